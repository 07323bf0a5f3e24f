// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Where a job's model comes from: its default constructor, a function, or a ready model.

#include <concepts>
#include <cstdint>
#include <exception>
#include <type_traits>

#include "lockstep/core/strong.hpp"
#include "lockstep/device/device.hpp"

namespace lockstep::detail {

/// Says that the model is constructed by default, once its device is selected. `{}` means this
/// rather than a model, because it converts to an enumeration without a constructor:
/// `Job job(session, {}, options)`.
enum class DefaultModel : std::uint8_t {};

/// A function that makes a `Model`, from `Arguments` or from nothing.
template <class F, class Model, class... Arguments>
concept ModelMaking = requires(F& make, Arguments&... arguments) {
  { make(arguments...) } -> std::same_as<Model>;
} || requires(F& make) {
  { make() } -> std::same_as<Model>;
};

/// Calls such a function.
template <class Model, class F, class... Arguments>
Model made_by(F& make, Arguments&... arguments) {
  if constexpr (std::invocable<F&, Arguments&...>) {
    return make(arguments...);
  } else {
    return make();
  }
}

/// A model from its default constructor.
template <class Model>
Model default_model() {
  static_assert(std::is_default_constructible_v<Model>,
                "lockstep: this model has no default constructor; give the job a function that "
                "makes one, [] { return Model(...); }, or a model");
  if constexpr (std::is_default_constructible_v<Model>) {
    return Model{};
  } else {
    std::terminate();  // never reached: the assertion above fails
  }
}

/// Calls a function that makes a `Model`. A model whose initial values come from the random numbers
/// of another library has `static Model make_seeded(Seed, Rank, on_gpu, make)`, in which that
/// library draws from the job's seed.
template <class Model, class Device, class F>
Model make_seeded(Seed seed, Rank rank, const F& make) {
  constexpr bool on_gpu = std::is_same_v<Device, Cuda>;
  if constexpr (requires { Model::make_seeded(seed, rank, on_gpu, make); }) {
    return Model::make_seeded(seed, rank, on_gpu, make);
  } else {
    return make();
  }
}

/// A model for another replica: a copy, or the result of `replicate()`.
template <class Model>
Model replicate(const Model& model) {
  constexpr bool replicates = requires { model.replicate(); };
  static_assert(
      replicates || std::copy_constructible<Model>,
      "lockstep: ParallelStrategy<DP> gives every replica a model of its own, and this one "
      "cannot be copied; let it be, or give it Model replicate() const");
  if constexpr (replicates) {
    return model.replicate();
  } else if constexpr (std::copy_constructible<Model>) {
    return model;
  } else {
    std::terminate();  // never reached: the assertion above fails
  }
}

}  // namespace lockstep::detail
