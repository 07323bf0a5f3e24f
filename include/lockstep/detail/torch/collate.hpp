// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `source | tensors()`: samples become batches of tensors, each sample written once.

#include <c10/util/StringUtil.h>

#include "lockstep/detail/data/pipeline.hpp"
#include "lockstep/detail/torch/batch.hpp"

namespace lockstep {

namespace detail {

/// Samples have `inputs` and `label`, or `data` and `target` as in LibTorch.
template <class Sample>
concept WithInputs =
    requires(const Sample& s) { s.inputs; } || requires(const Sample& s) { s.data; };
template <class Sample>
concept WithLabel =
    requires(const Sample& s) { s.label; } || requires(const Sample& s) { s.target; };

const auto& inputs_of(const auto& sample) {
  if constexpr (requires { sample.inputs; }) {
    return sample.inputs;
  } else {
    return sample.data;
  }
}
const auto& label_of(const auto& sample) {
  if constexpr (requires { sample.label; }) {
    return sample.label;
  } else {
    return sample.target;
  }
}

/// A row of a batch or its label: a tensor or numbers.
template <class Reference, class T = std::remove_cvref_t<Reference>>
concept TensorRow = std::same_as<T, at::Tensor> || TensorElement<T> || ElementRange<T>;

/// A sample for a batch of tensors; the label is optional.
template <class S>
concept TensorSample = WithInputs<S> && TensorRow<decltype(inputs_of(std::declval<const S&>()))> &&
                       (!WithLabel<S> || TensorRow<decltype(label_of(std::declval<const S&>()))>);

[[noreturn, gnu::cold]] inline void reject_row(const char* what, at::IntArrayRef has,
                                               at::IntArrayRef first) {
  fail("tensors",
       {"it has ", what, " of ", c10::str(has), " and the first sample of its batch has ",
        c10::str(first)},
       "give all samples one size with map, or say | padded(fill) and as_tensors(batch)");
}

/// Integer labels become int64.
template <class T>
using WrittenElement =
    std::conditional_t<std::integral<T> && !std::same_as<T, bool>, std::int64_t, T>;

/// Allocates `count` rows like the first one.
template <class Row>
void begin_rows(const Row& row, std::size_t count, at::Tensor& out, at::IntArrayRef shape,
                [[maybe_unused]] bool is_label) {
  std::vector<std::int64_t> sizes{static_cast<std::int64_t>(count)};
  at::ScalarType type{};
  if constexpr (std::same_as<Row, at::Tensor>) {
    type = row.scalar_type();
    if (is_label && at::isIntegralType(type, false)) type = at::kLong;
    sizes.insert(sizes.end(), row.sizes().begin(), row.sizes().end());
  } else if constexpr (TensorElement<Row>) {
    type = scalar_type_for<WrittenElement<Row>>();
  } else {
    type = scalar_type_for<std::ranges::range_value_t<Row>>();
    sizes.push_back(static_cast<std::int64_t>(std::ranges::size(row)));
  }
  if (!shape.empty()) {
    sizes.resize(1);
    sizes.insert(sizes.end(), shape.begin(), shape.end());
  }
  make_room(out, type, sizes);
}

/// Writes a row; the first determines the size of all. A nonempty `shape` replaces its shape.
template <class Row>
void put_row(const Row& row, std::size_t i, std::size_t count, at::Tensor& out,
             at::IntArrayRef shape, const char* what, bool is_label) {
  if (i == 0) begin_rows(row, count, out, shape, is_label);
  if constexpr (std::same_as<Row, at::Tensor>) {
    const at::Tensor to = out[static_cast<std::int64_t>(i)];
    if (row.numel() != to.numel() || (shape.empty() && row.sizes() != to.sizes()))
      reject_row(what, row.sizes(), to.sizes());
    to.copy_(shape.empty() ? row : row.view(to.sizes()));
  } else if constexpr (TensorElement<Row>) {
    using Written = WrittenElement<Row>;
    static_cast<Written*>(out.mutable_data_ptr())[i] = static_cast<Written>(row);
  } else {
    const std::int64_t width = out.numel() / out.size(0);
    const auto own = static_cast<std::int64_t>(std::ranges::size(row));
    if (own != width) reject_row(what, own, width);
    using T = std::ranges::range_value_t<Row>;
    std::copy(std::ranges::begin(row), std::ranges::end(row),
              static_cast<T*>(out.mutable_data_ptr()) + i * static_cast<std::size_t>(width));
  }
}

/// Writes samples as rows of a `TensorBatch`, each as soon as it is read.
struct TensorCollate : PipelineStage {
  template <class Sample>
  static TensorBatch batch();
  template <class Sample>
  static constexpr bool require() {
    static_assert(TensorSample<Sample>,
                  "lockstep: tensors takes samples with `inputs` and `label`, or `data` and "
                  "`target`: tensors, numbers, or vectors or spans of numbers; give samples both "
                  "with map, or say collate<Batch>(c)");
    return TensorSample<Sample>;
  }

  template <class Sample>
  void put(const Sample& sample, std::size_t i, std::size_t count, TensorBatch& out) const {
    if (i == 0) out.weights.assign(count, 1.f);
    put_row(inputs_of(sample), i, count, out.inputs, shape, "inputs", false);
    if constexpr (WithLabel<Sample>)
      put_row(label_of(sample), i, count, out.labels, {}, "a label", true);
  }

  std::vector<std::int64_t> shape;
};

}  // namespace detail

inline namespace torch_modules {

/// Yields `TensorBatch`es from samples with `inputs` and `label`, or `data` and `target`, of one
/// size; integer labels become int64. `tensors({1, 28, 28})` shapes flat inputs. Memory is reused.
inline auto tensors(std::vector<std::int64_t> shape = {}) {
  return detail::TensorCollate{{}, std::move(shape)};
}

}  // namespace torch_modules

}  // namespace lockstep
