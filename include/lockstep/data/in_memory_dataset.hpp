// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A data set of vectors: rows of inputs, and a label for each.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/data/batch.hpp"
#include "lockstep/data/dataset.hpp"

namespace lockstep {

/// Samples of `X` with labels of `Y`, in memory.
template <class X, class Y>
class InMemoryDataset {
 public:
  using batch_type = LabelledBatch<X, Y>;
  using sample_type = LabelledSample<X, Y>;

  /// `inputs` is row-major, with as many rows as there are labels.
  InMemoryDataset(std::vector<X> inputs, std::vector<Y> labels)
      : inputs_(std::move(inputs)), labels_(std::move(labels)) {
    width_ = labels_.empty() ? 0 : inputs_.size() / labels_.size();
    if (width_ * labels_.size() != inputs_.size())
      detail::fail("InMemoryDataset",
                   {inputs_.size(), " inputs are no whole rows for ", labels_.size(), " labels"},
                   "give one row of inputs, all of the same width, for every label");
  }

  std::size_t size() const { return labels_.size(); }
  std::size_t width() const { return width_; }

  template <LabelledRows Batch>
  void load(std::span<const std::size_t> indices, Batch& out) const {
    out.resize(indices.size(), width_);
    for (std::size_t i = 0; i != indices.size(); ++i) {
      std::copy_n(inputs_.data() + indices[i] * width_, width_, out.row(i).data());
      out.labels[i] = labels_[indices[i]];
    }
  }

  void read(std::size_t index, sample_type& out) const {
    out = {std::span(inputs_).subspan(index * width_, width_), labels_[index]};
  }

 private:
  std::vector<X> inputs_;
  std::vector<Y> labels_;
  std::size_t width_ = 0;
};

static_assert(Dataset<InMemoryDataset<float, std::int32_t>>);
static_assert(SampleSource<InMemoryDataset<float, std::int32_t>>);

}  // namespace lockstep
