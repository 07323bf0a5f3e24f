// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The step of a rank among others: it tells the reducer which gradients are complete.

#include "lockstep/model/lookup.hpp"
#include "lockstep/model/tensor.hpp"

namespace lockstep {

/// A bare step whose `ready` is heard. The parameter is a constant, and so is its bucket where
/// shapes are static.
template <class Model, class Bare, class Reducer>
class TrackedStep : public Bare {
 public:
  TrackedStep(const Bare& bare, Reducer& reducer) : Bare(bare), reducer_(&reducer) {}

  /// Says that a gradient is complete. With the last one of a bucket, its reduction starts.
  template <class Key>
  void ready(Key) const {
    reducer_->template ready<NamedTensor<Model, TensorRole::parameter, Key>>();
  }

 private:
  Reducer* reducer_;
};

}  // namespace lockstep
