// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A data set in memory: rows of inputs, and a label for each.

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/data/batch.hpp"
#include "lockstep/data/dataset.hpp"

namespace lockstep {

namespace detail {

/// A contiguous range of T: a vector of the standard library or of Thrust, an array, a span.
template <class R, class T>
concept MemoryOf =
    ContiguousMemory<const R> && std::same_as<std::remove_cv_t<FlatElement<const R>>, T>;

/// The elements of any contiguous range. Those that the host cannot read, as in a
/// `thrust::device_vector`, have references that are objects, and Thrust copies them.
template <class T, class R>
std::vector<T> host_vector(const R& range) {
  std::vector<T> values(std::size(range));
  if constexpr (std::is_lvalue_reference_v<decltype(*std::begin(range))>) {
    std::copy_n(flat(range).data(), values.size(), values.data());
  } else {
    copy(range.begin(), range.end(), values.data());
  }
  return values;
}

/// How wide rows are, if so many inputs are as many rows as there are labels.
inline std::size_t width_of_rows(const char* operation, std::size_t inputs, std::size_t labels) {
  const std::size_t width = labels == 0 ? 0 : inputs / labels;
  if (width * labels != inputs)
    fail(operation, {inputs, " inputs are no whole rows for ", labels, " labels"},
         "give one row of inputs, all of the same width, for every label");
  return width;
}

}  // namespace detail

/// Samples of `X` with labels of `Y`, in memory.
template <class X, class Y>
class InMemoryDataset {
 public:
  using batch_type = LabelledBatch<X, Y>;
  using sample_type = LabelledSample<X, Y>;

  /// `inputs` is row-major, with as many rows as there are labels.
  InMemoryDataset(std::vector<X> inputs, std::vector<Y> labels)
      : inputs_(std::move(inputs)),
        labels_(std::move(labels)),
        width_(detail::width_of_rows("InMemoryDataset", inputs_.size(), labels_.size())) {}

  /// The same of other contiguous ranges, which are copied: arrays, spans, Thrust's vectors.
  template <detail::MemoryOf<X> Inputs, detail::MemoryOf<Y> Labels>
    requires(!std::same_as<Inputs, std::vector<X>> || !std::same_as<Labels, std::vector<Y>>)
  InMemoryDataset(const Inputs& inputs, const Labels& labels)
      : InMemoryDataset(detail::host_vector<X>(inputs), detail::host_vector<Y>(labels)) {}

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
  std::size_t width_;
};

template <class Inputs, class Labels>
InMemoryDataset(const Inputs&, const Labels&)
    -> InMemoryDataset<std::remove_cv_t<detail::FlatElement<const Inputs>>,
                       std::remove_cv_t<detail::FlatElement<const Labels>>>;

static_assert(Dataset<InMemoryDataset<float, std::int32_t>>);
static_assert(SampleSource<InMemoryDataset<float, std::int32_t>>);

}  // namespace lockstep
