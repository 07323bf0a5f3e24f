// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batches of labelled, weighted samples: rows of one width, padded or concatenated samples.

#include "lockstep/detail/core/standard.hpp"

namespace lockstep {

namespace detail {

template <class T>
void copy_part(const std::vector<T>& all, std::size_t first, std::size_t count,
               std::vector<T>& to) {
  to.assign(all.data() + first, all.data() + first + count);
}

}  // namespace detail

/// A batch with a weight per sample, as `Masked` needs it.
template <class B>
concept WeightedBatch = requires(B& batch, std::size_t i) { batch.weights[i] = 0.f; };

/// A batch into which a data set writes rows in place: `resize(rows, width)` makes room for samples
/// of weight 1 and reuses memory, `row(i)` is the memory of one sample's inputs.
template <class B>
concept LabelledRows = requires(B& batch, std::size_t n) {
  batch.resize(n, n);
  batch.row(n).data()[n] = batch.row(n).data()[n];
  batch.labels[n] = batch.labels[n];
} && WeightedBatch<B>;

/// Samples with a label and a weight each.
template <class X, class Y>
struct LabelledBatch {
  std::vector<X> inputs;  ///< row-major, `width` columns
  std::vector<Y> labels;
  std::vector<float> weights;  ///< per sample: 1, or 0 for a duplicate under `Masked`
  std::size_t width = 0;

  std::size_t size() const { return labels.size(); }

  std::span<X> row(std::size_t i) { return std::span(inputs).subspan(i * width, width); }
  std::span<const X> row(std::size_t i) const {
    return std::span(inputs).subspan(i * width, width);
  }

  /// Copies samples [first, first + count) into another batch, whose memory is reused.
  void slice(std::size_t first, std::size_t count, LabelledBatch& out) const {
    out.width = width;
    detail::copy_part(inputs, first * width, count * width, out.inputs);
    detail::copy_part(labels, first, count, out.labels);
    detail::copy_part(weights, first, count, out.weights);
  }

  /// Makes room for `rows` samples of weight 1; memory is reused.
  void resize(std::size_t rows, std::size_t columns) {
    width = columns;
    inputs.resize(rows * columns);
    labels.resize(rows);
    weights.assign(rows, 1.f);
  }

  friend void pack(auto& archive, LabelledBatch& batch) {
    archive(batch.width, batch.inputs, batch.labels, batch.weights);
  }
};

static_assert(LabelledRows<LabelledBatch<float, int>>);

/// Rows as long as the longest sample, with padding behind shorter ones.
template <class X, class Y>
struct PaddedBatch : LabelledBatch<X, Y> {
  std::vector<std::size_t> lengths;  ///< of each sample, without padding

  /// The sample without padding.
  std::span<const X> sample(std::size_t i) const { return this->row(i).first(lengths[i]); }

  void slice(std::size_t first, std::size_t count, PaddedBatch& out) const {
    LabelledBatch<X, Y>::slice(first, count, out);
    detail::copy_part(lengths, first, count, out.lengths);
  }

  void resize(std::size_t rows, std::size_t columns) {
    LabelledBatch<X, Y>::resize(rows, columns);
    lengths.assign(rows, columns);
  }

  friend void pack(auto& archive, PaddedBatch& batch) {
    archive(static_cast<LabelledBatch<X, Y>&>(batch), batch.lengths);
  }
};

static_assert(WeightedBatch<PaddedBatch<float, int>>);

/// Concatenated samples: sample i is inputs [offsets[i], offsets[i + 1]).
template <class X, class Y>
struct RaggedBatch {
  std::vector<X> inputs;
  std::vector<std::size_t> offsets;  ///< one per sample, and the end
  std::vector<Y> labels;
  std::vector<float> weights;  ///< per sample: 1, or 0 for a duplicate under `Masked`

  std::size_t size() const { return labels.size(); }

  std::span<const X> row(std::size_t i) const {
    return std::span(inputs).subspan(offsets[i], offsets[i + 1] - offsets[i]);
  }

  void slice(std::size_t first, std::size_t count, RaggedBatch& out) const {
    const std::size_t begin = offsets.empty() ? 0 : offsets[first];
    const std::size_t end = offsets.empty() ? 0 : offsets[first + count];
    detail::copy_part(inputs, begin, end - begin, out.inputs);
    out.offsets.assign(1, 0);
    for (std::size_t i = first; i != first + count; ++i)
      out.offsets.push_back(offsets[i + 1] - begin);
    detail::copy_part(labels, first, count, out.labels);
    detail::copy_part(weights, first, count, out.weights);
  }

  friend void pack(auto& archive, RaggedBatch& batch) {
    archive(batch.inputs, batch.offsets, batch.labels, batch.weights);
  }
};

static_assert(WeightedBatch<RaggedBatch<float, int>>);

}  // namespace lockstep
