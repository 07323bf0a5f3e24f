// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The step of a job whose parameters are gathered after each update.

#include <initializer_list>
#include <type_traits>
#include <utility>

#include "lockstep/bucket/step.hpp"
#include "lockstep/model/lookup.hpp"
#include "lockstep/strategy/gradients.hpp"

namespace lockstep::detail {

/// A step that waits for parameters, bucket by bucket, when a model asks for the first of each.
template <class Model, class Bare, class Gradients, class Gathers>
class ShardedStep : public TrackedStep<Model, Bare, Gradients> {
  using Base = TrackedStep<Model, Bare, Gradients>;

 public:
  ShardedStep(const Bare& bare, Gradients& gradients, Gathers& gathers)
      : Base(bare, gradients), gradients_(&gradients), gathers_(&gathers) {}

  template <class Key>
  auto param(Key key) const {
    gathers_->wait_for_parameter(find_tensor<Model, TensorRole::parameter>(key).index);
    return Base::param(key);
  }
  template <class F>
  void for_each_parameter(F&& f) const {
    gathers_->wait_all();
    Base::for_each_parameter(f);
  }
  /// Waits for all parameters. Returns whether some were still under way.
  bool await_parameters() const {
    const bool were_pending = gathers_->is_pending();
    gathers_->wait_all();
    return were_pending;
  }

  /// A parameter's gradient, to write. Where a rank gives gradients away, memory is handed out for
  /// a few buckets at a time.
  template <class Key>
  auto grad(Key key) const {
    if constexpr (frees) {
      return gradients_->freed_gradient(key);
    } else {
      return Base::grad(key);
    }
  }
  template <class Key, class Value = std::initializer_list<double>>
  void set_grad(Key key, const Value& value) const {
    if constexpr (frees) {
      if constexpr (requires { this->write_view(grad(key), key, value); }) {
        this->write_view(grad(key), key, value);  // of a GPU
      } else {
        write_gradient(grad(key), key, value);
      }
      this->ready(key);
    } else {
      Base::set_grad(key, value);
    }
  }
  template <class F>
  void for_each_gradient(F&& f) const {
    static_assert(!frees,
                  "lockstep: with Sharding<ZeroRedundancy, Gradients> no rank has all gradients; "
                  "use ZeroRedundancy alone to look at them");
    if constexpr (!frees) Base::for_each_gradient(f);
  }

 private:
  static constexpr bool frees = Gradients::frees;

  Gradients* gradients_;
  Gathers* gathers_;
};

template <class Traits, class Model, class Bare, class Gradients, class Updating>
auto choose_step() {
  if constexpr (Traits::shards) {
    using Gathers = std::remove_reference_t<decltype(std::declval<Updating&>().gathers())>;
    return std::type_identity<ShardedStep<Model, Bare, Gradients, Gathers>>{};
  } else if constexpr (Traits::tracks) {
    return std::type_identity<TrackedStep<Model, Bare, Gradients>>{};
  } else {
    return std::type_identity<Bare>{};
  }
}
/// The step that a model's forward and backward get.
template <class Traits, class Model, class Bare, class Gradients, class Updating>
using StepOf = typename decltype(choose_step<Traits, Model, Bare, Gradients, Updating>())::type;

}  // namespace lockstep::detail
