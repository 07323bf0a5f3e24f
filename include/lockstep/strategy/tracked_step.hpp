// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The step of a model whose gradients are tracked.

#include <initializer_list>

#include "lockstep/model/lookup.hpp"

namespace lockstep::detail {

/// A bare step whose `ready` tells the gradients. The parameter is a constant where its key is a
/// name, and so is its bucket where shapes are static.
template <class Model, class Bare, class Gradients>
class TrackedStep : public Bare {
 public:
  TrackedStep(const Bare& bare, Gradients& gradients) : Bare(bare), gradients_(&gradients) {}

  /// Says that a gradient is complete. With the last one of a bucket, its reduction starts.
  template <class Key>
  void ready(Key key) const {
    Bare::ready(key);  // refuses what has no gradient
    gradients_->ready(find_tensor<Model, TensorRole::parameter>(key));
  }

  /// Says that a parameter has no gradient in this pass, which counts as zero: with
  /// `UnusedParameters<Zero>`, for those who know before the end of backward.
  template <class Key>
  void unused(Key key) const
    requires(Gradients::skips_unused)
  {
    Bare::ready(key);
    gradients_->unused(find_tensor<Model, TensorRole::parameter>(key).index);
  }

  /// Writes a gradient and says that it is complete.
  template <class Key, class Value = std::initializer_list<double>>
  void set_grad(Key key, const Value& value) const {
    this->write_grad(key, value);
    ready(key);
  }

 private:
  Gradients* gradients_;
};

}  // namespace lockstep::detail
