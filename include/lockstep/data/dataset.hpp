// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The data set concept: a number of samples, loaded some at a time into a batch.

#include <concepts>
#include <cstddef>
#include <span>

namespace lockstep {

/// `load` replaces what `out` held by the samples of `indices`, in that order, and reuses its
/// memory. It is const and is called by several threads at once.
template <class D>
concept Dataset =
    requires(const D& dataset, std::span<const std::size_t> indices, typename D::batch_type& out) {
      requires std::default_initializable<typename D::batch_type>;
      { dataset.size() } -> std::convertible_to<std::size_t>;
      { dataset.load(indices, out) } -> std::same_as<void>;
    };

/// A batch with a weight for each of its samples; `Masked` needs one.
template <class B>
concept WeightedBatch = requires(B& batch, std::size_t i) { batch.weights[i] = 0.f; };

}  // namespace lockstep
