// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The step of a rank among others: it tells the buckets which gradients are complete.

#include "lockstep/model/lookup.hpp"
#include "lockstep/model/tensor.hpp"

namespace lockstep::detail {

/// A bare step whose `ready` is heard. The parameter is a constant where its key is a name, and so
/// is its bucket where shapes are static.
template <class Model, class Bare, class Gradients>
class TrackedStep : public Bare {
 public:
  TrackedStep(const Bare& bare, Gradients& gradients) : Bare(bare), gradients_(&gradients) {}

  /// Says that a gradient is complete. With the last one of a bucket, its reduction starts.
  template <class Key>
  void ready(Key key) const {
    gradients_->ready(find_tensor<Model, TensorRole::parameter>(key));
  }

 private:
  Gradients* gradients_;
};

}  // namespace lockstep::detail
