// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A batch of samples of different length, one behind the other.

#include <cstddef>
#include <span>
#include <vector>

#include "lockstep/data/dataset.hpp"

namespace lockstep {

/// Samples one behind the other: sample i is inputs [offsets[i], offsets[i + 1]).
template <class X, class Y>
struct RaggedBatch {
  std::vector<X> inputs;
  std::vector<std::size_t> offsets;  ///< one more than samples; the last is the end
  std::vector<Y> labels;
  std::vector<float> weights;  ///< of each sample: 1, or 0 for a duplicate under `Masked`

  std::size_t size() const { return labels.size(); }

  std::span<X> row(std::size_t i) {
    return std::span(inputs).subspan(offsets[i], offsets[i + 1] - offsets[i]);
  }
  std::span<const X> row(std::size_t i) const {
    return std::span(inputs).subspan(offsets[i], offsets[i + 1] - offsets[i]);
  }

  /// Copies samples [first, first + count) into another batch, whose memory is kept.
  void slice(std::size_t first, std::size_t count, RaggedBatch& out) const {
    const auto part = [](const auto& all, std::size_t begin, std::size_t size, auto& to) {
      const auto at = all.begin() + static_cast<std::ptrdiff_t>(begin);
      to.assign(at, at + static_cast<std::ptrdiff_t>(size));
    };
    const std::size_t begin = offsets.empty() ? 0 : offsets[first];
    const std::size_t end = offsets.empty() ? 0 : offsets[first + count];
    part(inputs, begin, end - begin, out.inputs);
    out.offsets.assign(1, 0);
    for (std::size_t i = first; i != first + count; ++i)
      out.offsets.push_back(offsets[i + 1] - begin);
    part(labels, first, count, out.labels);
    part(weights, first, count, out.weights);
  }
};

static_assert(WeightedBatch<RaggedBatch<float, int>>);

}  // namespace lockstep
