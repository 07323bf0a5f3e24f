// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A batch of samples of different length, filled up to the longest.

#include <cstddef>
#include <span>
#include <vector>

#include "lockstep/data/dataset.hpp"

namespace lockstep {

/// Rows as long as the longest sample; what is behind the end of a shorter one was filled up.
template <class X, class Y>
struct PaddedBatch {
  std::vector<X> inputs;             ///< row-major, `width` columns
  std::vector<std::size_t> lengths;  ///< of each sample, without what was filled up
  std::vector<Y> labels;
  std::vector<float> weights;  ///< of each sample: 1, or 0 for a duplicate under `Masked`
  std::size_t width = 0;

  std::size_t size() const { return labels.size(); }

  /// The whole row.
  std::span<X> row(std::size_t i) { return std::span(inputs).subspan(i * width, width); }
  std::span<const X> row(std::size_t i) const {
    return std::span(inputs).subspan(i * width, width);
  }
  /// The sample's own part of its row.
  std::span<const X> sample(std::size_t i) const { return row(i).first(lengths[i]); }

  /// Copies samples [first, first + count), with rows of the same width, into another batch, whose
  /// memory is kept.
  void slice(std::size_t first, std::size_t count, PaddedBatch& out) const {
    const auto part = [](const auto& all, std::size_t begin, std::size_t size, auto& to) {
      const auto at = all.begin() + static_cast<std::ptrdiff_t>(begin);
      to.assign(at, at + static_cast<std::ptrdiff_t>(size));
    };
    out.width = width;
    part(inputs, first * width, count * width, out.inputs);
    part(lengths, first, count, out.lengths);
    part(labels, first, count, out.labels);
    part(weights, first, count, out.weights);
  }

  /// Makes room for `rows` samples of weight 1 in rows of `columns`; memory is kept.
  void resize(std::size_t rows, std::size_t columns) {
    width = columns;
    inputs.resize(rows * columns);
    lengths.assign(rows, columns);
    labels.resize(rows);
    weights.assign(rows, 1.f);
  }
};

static_assert(WeightedBatch<PaddedBatch<float, int>>);

}  // namespace lockstep
