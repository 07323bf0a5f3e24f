// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The data set concept: a number of samples, loaded some at a time into a batch.

#include <concepts>
#include <cstddef>
#include <span>

#include "lockstep/core/strong.hpp"

namespace lockstep {

/// Which pass over the data a batch belongs to. A loader hands over its sampler's, so that what a
/// data set draws at random follows from the seed, the epoch and the sample alone.
struct Pass {
  Seed seed{};
  Epoch epoch{};

  friend bool operator==(const Pass&, const Pass&) = default;
};

namespace detail {

/// Loads batches of type B that are the same in every pass.
template <class D, class B>
concept Loading = requires(const D& dataset, std::span<const std::size_t> indices, B& out) {
  { dataset.load(indices, out) } -> std::same_as<void>;
};

/// Loads batches of type B that depend on the pass.
template <class D, class B>
concept PassLoading =
    requires(const D& dataset, std::span<const std::size_t> indices, Pass pass, B& out) {
      { dataset.load(indices, pass, out) } -> std::same_as<void>;
    };

}  // namespace detail

/// `load(indices, out)` replaces what `out` held by the samples of `indices`, in that order, and
/// reuses its memory. It is const and is called by several threads at once. A data set that draws
/// random numbers has `load(indices, pass, out)`, which is then the one that loaders call.
template <class D>
concept Dataset = requires(const D& dataset) {
  requires std::default_initializable<typename D::batch_type>;
  { dataset.size() } -> std::convertible_to<std::size_t>;
  requires detail::Loading<D, typename D::batch_type> ||
               detail::PassLoading<D, typename D::batch_type>;
};

/// A batch with a weight for each of its samples; `Masked` needs one.
template <class B>
concept WeightedBatch = requires(B& batch, std::size_t i) { batch.weights[i] = 0.f; };

}  // namespace lockstep
