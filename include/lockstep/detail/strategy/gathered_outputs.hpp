// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The outputs of all replicas in one tensor, in order, and their gradients.

#include "lockstep/detail/bucket/layout.hpp"
#include "lockstep/detail/model/model.hpp"
#include "lockstep/detail/strategy/scatter.hpp"

namespace lockstep::detail {

/// The view's type holds numbers only, as nvcc needs (see `make_view`).
template <class Memory, bool Const, class T, std::size_t... E>
auto output_view(OutputOf<T, E...>, std::byte* data, std::size_t rows,
                 const std::array<std::size_t, sizeof...(E)>& sizes) {
  return std::apply(
      [&](auto... size) {
        return make_view<Memory, Const, element_kind<T>(), dynamic, E...>(data, rows, size...);
      },
      sizes);
}

template <class Model, class Memory, bool Const>
using OutputRows = decltype(output_view<Memory, Const>(typename Model::Output{}, nullptr, 0,
                                                       typename Model::Output::Sizes{}));

/// One replica's rows of outputs and gradients, whose tensors the root owns. Replicas on the root's
/// device, as all are on a CPU, use their rows in place; others have memory of their own and copy.
template <class Model, class Memory, class Execution>
class GatheredOutputs {
  using Output = typename Model::Output;

 public:
  /// `is_far`: the root is on another device.
  void join(GatheredOutputs& root, bool is_far) {
    root_ = &root;
    is_far_ = is_far;
  }

  std::size_t capacity() const { return capacity_; }

  /// No replica may be using the tensors.
  void reserve(const Model& model, std::size_t rows) {
    sizes_ = Output::sizes(model);
    capacity_ = rows;
    if (root_ != this && !is_far_) return;
    outputs_.emplace(rows * row_bytes());
    gradients_.emplace(rows * row_bytes());
  }

  /// A replica's rows of the outputs, to write; `deliver` copies them to a root on another device.
  auto outputs(RowRange rows) const { return view<false>(*here().outputs_, here(rows)); }
  void deliver(Execution& execution, RowRange rows) const {
    if (!is_far_) return;
    execution.copy(root_->at(*root_->outputs_, rows.first), outputs_->data(),
                   rows.count * row_bytes());
  }

  /// A replica's rows of the gradients, to read after `fetch`.
  auto gradients(RowRange rows) const { return view<true>(*here().gradients_, here(rows)); }
  void fetch(Execution& execution, RowRange rows) const {
    if (!is_far_) return;
    execution.copy(gradients_->data(), root_->at(*root_->gradients_, rows.first),
                   rows.count * row_bytes());
  }

  /// The bytes of one sample's outputs, after `reserve`.
  std::size_t row_bytes() const {
    std::size_t bytes = sizeof(typename Output::element);
    for (std::size_t size : sizes_) bytes *= size;
    return bytes;
  }

  /// All rows, for the loss.
  auto all_outputs(std::size_t rows) const { return view<true>(*root_->outputs_, {0, rows}); }
  auto all_gradients(std::size_t rows) const { return view<false>(*root_->gradients_, {0, rows}); }

 private:
  using Arena = typename Execution::Arena;

  const GatheredOutputs& here() const { return is_far_ ? *this : *root_; }
  RowRange here(RowRange rows) const { return is_far_ ? RowRange{0, rows.count} : rows; }

  std::byte* at(const Arena& arena, std::size_t row) const {
    return arena.data() + row * row_bytes();
  }
  template <bool Const>
  auto view(const Arena& arena, RowRange rows) const {
    return output_view<Memory, Const>(Output{}, at(arena, rows.first), rows.count, sizes_);
  }

  GatheredOutputs* root_ = this;
  bool is_far_ = false;
  std::size_t capacity_ = 0;
  typename Output::Sizes sizes_{};
  std::optional<Arena> outputs_;
  std::optional<Arena> gradients_;
};

/// Nothing for models whose output is their loss.
template <bool HasOutputs, class Model, class Memory, class Execution>
using OutputsOf = std::conditional_t<HasOutputs, GatheredOutputs<Model, Memory, Execution>,
                                     std::type_identity<void>>;

}  // namespace lockstep::detail
