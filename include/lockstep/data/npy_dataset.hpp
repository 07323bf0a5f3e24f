// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A pair of `.npy` files, inputs and labels, as a data set.

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/labelled_batch.hpp"
#include "lockstep/data/npy.hpp"
#include "lockstep/data/sample.hpp"

namespace lockstep {

namespace detail {

/// Checks that two files belong together: one label, of a type that `wanted` can hold, for every
/// row of inputs.
void check_npy_labels(const NpyFile& inputs, const NpyFile& labels, ElementKind wanted);

/// An integer of any kind; nothing where it is above the signed ones.
std::optional<std::int64_t> npy_integer(const NpyFile& file, std::size_t element);

[[noreturn, gnu::cold]] void fail_npy_label(const NpyFile& file, std::size_t sample,
                                            ElementKind wanted);

}  // namespace detail

/// Rows of one file with labels of another. Nothing is read before it is drawn, so the files may be
/// larger than memory. Inputs are `X` in the file too; integer labels may have another integer type
/// there, as NumPy's are int64 unless one says otherwise, and a label that `Y` cannot hold is an
/// error when it is loaded. Copies share the mapping.
template <Element X, Element Y>
class NpyDataset {
 public:
  using batch_type = LabelledBatch<X, Y>;
  using sample_type = LabelledSample<X, Y>;

  NpyDataset(NpyArray<X> inputs, NpyFile labels)
      : inputs_(std::move(inputs)), labels_(std::move(labels)) {
    detail::check_npy_labels(inputs_.file(), labels_, element_kind<Y>());
  }

  std::size_t size() const { return inputs_.size(); }
  std::size_t width() const { return inputs_.width(); }
  const NpyArray<X>& inputs() const { return inputs_; }

  template <LabelledRows Batch>
  void load(std::span<const std::size_t> indices, Batch& out) const {
    prepare(indices);
    out.resize(indices.size(), width());
    for (std::size_t i = 0; i != indices.size(); ++i) {
      // Not std::ranges::copy, which g++ 12 makes a loop over elements of.
      std::copy_n(inputs_.row(indices[i]).data(), width(), out.row(i).data());
      out.labels[i] = label(indices[i]);
    }
  }

  void read(std::size_t index, sample_type& out) const { out = {inputs_.row(index), label(index)}; }

  /// What must be done once before the samples of a batch are read one by one; `load` does it.
  void prepare(std::span<const std::size_t> indices) const {
    labels_.file().require_intact();
    inputs_.prepare(indices);
  }

 private:
  /// The row was asked for first, so the index is below the size.
  Y label(std::size_t index) const {
    if constexpr (std::integral<Y>) {
      if (labels_.kind() != element_kind<Y>()) {
        const std::optional<std::int64_t> value = detail::npy_integer(labels_, index);
        if (!value || !std::in_range<Y>(*value))
          detail::fail_npy_label(labels_, index, element_kind<Y>());
        return static_cast<Y>(*value);
      }
    }
    Y value;
    std::memcpy(&value, labels_.bytes().data() + index * sizeof(Y), sizeof(Y));
    return value;
  }

  NpyArray<X> inputs_;
  NpyFile labels_;
};

static_assert(Dataset<NpyDataset<float, std::int32_t>>);
static_assert(SampleSource<NpyDataset<float, std::int32_t>>);

/// A sample for every row of `inputs`, which has the shape (n, ...); `labels` has (n) or (n, 1).
template <Element X, Element Y>
NpyDataset<X, Y> npy_dataset(const std::string& inputs, const std::string& labels,
                             Access access = Access::automatic) {
  return {NpyArray<X>(inputs, access), NpyFile(labels)};
}

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/npy_dataset.ipp"
#endif
