// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batches of tensors: serialization, splitting for replicas, conversion from lockstep's.

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/serialize.hpp"
#include "lockstep/detail/strategy/scatter.hpp"
#include "lockstep/detail/torch/tensors.hpp"

namespace lockstep::detail {

/// Is a tensor's memory referenced by no graph, slice or copy?
inline bool is_ours_alone(const at::Tensor& tensor) {
  return tensor.defined() && tensor.use_count() == 1 && tensor.is_contiguous() &&
         !tensor.requires_grad() && tensor.is_cpu() && tensor.storage().use_count() == 1;
}

/// Makes `tensor` contiguous with this type and shape, if possible in the same memory.
inline void make_room(at::Tensor& tensor, at::ScalarType type, at::IntArrayRef sizes) {
  if (is_ours_alone(tensor) && tensor.scalar_type() == type) {
    if (tensor.sizes() != sizes) tensor.resize_(sizes);
  } else {
    tensor = at::empty(sizes, at::TensorOptions(type));
  }
}

/// Serializes type, shape and elements row by row, without strides or device.
inline void pack(ArchiveWriter& archive, at::Tensor& tensor) {
  auto type = static_cast<std::int8_t>(tensor.scalar_type());
  if (!tensor.defined()) type = static_cast<std::int8_t>(at::ScalarType::Undefined);
  archive(type);
  if (!tensor.defined()) return;
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  archive(sizes);
  const at::Tensor rows = tensor.detach().cpu().contiguous();
  archive.reserve(rows.nbytes(), 1);
  if (rows.nbytes() != 0) archive.bytes(rows.const_data_ptr(), rows.nbytes());
}

inline void pack(ArchiveReader& archive, at::Tensor& tensor) {
  std::int8_t type = 0;
  archive(type);
  if (type == static_cast<std::int8_t>(at::ScalarType::Undefined)) {
    tensor = at::Tensor();
    return;
  }
  std::vector<std::int64_t> sizes;
  archive(sizes);
  const std::size_t bytes = archive.reserve(0, 1);
  bool fits = type >= 0 && type < static_cast<std::int8_t>(at::ScalarType::NumOptions);
  const auto scalar = static_cast<at::ScalarType>(type);
  std::uint64_t wanted = fits ? c10::elementSize(scalar) : 0;
  for (const std::int64_t size : sizes)
    fits = fits && size >= 0 &&
           !__builtin_mul_overflow(wanted, static_cast<std::uint64_t>(size), &wanted);
  if (!fits || wanted != bytes)
    fail("feed", {"an archive does not hold a tensor here"},
         "let all ranks run the same program, and pack and unpack the same fields");
  make_room(tensor, scalar, sizes);
  if (bytes != 0) archive.bytes(tensor.mutable_data_ptr(), bytes);
}

/// A struct's own `pack` is more specialised and takes precedence.
template <class Way, class B>
  requires(std::same_as<Way, ArchiveWriter> || std::same_as<Way, ArchiveReader>) &&
          (tensor_field_count<B>() != 0)
void pack(Way& archive, B& batch) {
  for (at::Tensor& tensor : tensors_of(batch)) archive(tensor);
}

/// A tensor is split along its first dimension into views; a scalar is shared.
template <>
struct Cutting<at::Tensor> {
  static constexpr bool cuts = true;
  static void sizes(const at::Tensor& tensor, const auto& f) {
    if (is_shared(tensor)) return;
    f(static_cast<std::size_t>(tensor.size(0)));
  }
  static at::Tensor take(const at::Tensor& tensor, const auto& rows_of) {
    if (is_shared(tensor)) return tensor;
    const RowRange rows = rows_of(static_cast<std::size_t>(tensor.size(0)));
    return tensor.narrow(0, static_cast<std::int64_t>(rows.first),
                         static_cast<std::int64_t>(rows.count));
  }

 private:
  static bool is_shared(const at::Tensor& tensor) { return !tensor.defined() || tensor.dim() == 0; }
};

/// A struct is split field by field, each along its first dimension, as in Python's DataParallel.
template <class B>
  requires(WithFields<B> && std::copyable<B> && !SlicedInto<B> && !Sliced<B>)
struct Cutting<B> {
  static constexpr bool cuts = true;
  static void sizes(const B& batch, const auto& f) {
    for_each_field(batch,
                   [&]<class Field>(const Field& field) { Cutting<Field>::sizes(field, f); });
  }
  static B take(const B& batch, const auto& rows_of) {
    B share = batch;
    for_each_field(share, [&]<class Field>(Field& field) {
      if constexpr (is_cut<Field>) field = Cutting<Field>::take(field, rows_of);
    });
    return share;
  }
};

/// Labels and lengths for LibTorch: integers become int64, narrower ones by a copy.
template <class Y>
at::Tensor label_tensor(const std::vector<Y>& labels) {
  static_assert(Element<Y>,
                "lockstep: labels become a tensor if they are numbers; take others out "
                "of the batch in the model's loss");
  at::Tensor tensor;
  if constexpr (Element<Y>) tensor = as_tensor(labels);
  if constexpr (std::integral<Y>)
    return sizeof(Y) == 8 ? tensor.view(at::kLong) : tensor.to(at::kLong);
  return tensor;
}

}  // namespace lockstep::detail

namespace lockstep {

inline namespace torch_modules {

/// Labelled samples. Slices are views.
struct TensorBatch {
  at::Tensor inputs;  ///< a row per sample, of any shape
  at::Tensor labels;
  std::vector<float> weights{};  ///< per sample: 1, or 0 for a duplicate under `Masked`
  at::Tensor lengths{};          ///< of samples in rows padded to the longest, int64

  std::size_t size() const {
    return inputs.defined() ? static_cast<std::size_t>(inputs.size(0)) : 0;
  }
  TensorBatch slice(std::size_t first, std::size_t count) const {
    const auto rows = [=](std::size_t size) {
      return size == 0 ? detail::RowRange{} : detail::RowRange{first, count};
    };
    return {detail::Cutting<at::Tensor>::take(inputs, rows),
            detail::Cutting<at::Tensor>::take(labels, rows),
            detail::Cutting<std::vector<float>>::take(weights, rows),
            detail::Cutting<at::Tensor>::take(lengths, rows)};
  }
  void clear() { *this = slice(0, 0); }

  friend void pack(auto& archive, TensorBatch& batch) {
    archive(batch.inputs, batch.labels, batch.weights, batch.lengths);
  }
};

static_assert(WeightedBatch<TensorBatch>);

/// A lockstep batch as tensors over the same memory, which is valid until the loop's next batch:
///
///     torch::Tensor loss(const LabelledBatch<float, int>& rows) {
///       const TensorBatch batch = as_tensors(rows);
///
/// Only integer labels of fewer than 64 bits are copied.
template <class X, class Y>
TensorBatch as_tensors(const LabelledBatch<X, Y>& batch) {
  const std::int64_t sizes[] = {static_cast<std::int64_t>(batch.size()),
                                static_cast<std::int64_t>(batch.width)};
  return {as_tensor(batch.inputs, sizes), detail::label_tensor(batch.labels), batch.weights};
}
template <class X, class Y>
TensorBatch as_tensors(const PaddedBatch<X, Y>& batch) {
  TensorBatch tensors = as_tensors(static_cast<const LabelledBatch<X, Y>&>(batch));
  tensors.lengths = detail::label_tensor(batch.lengths);
  return tensors;
}
// A temporary's memory would be gone.
template <class X, class Y>
TensorBatch as_tensors(const LabelledBatch<X, Y>&&) = delete;
template <class X, class Y>
TensorBatch as_tensors(const PaddedBatch<X, Y>&&) = delete;

}  // namespace torch_modules

}  // namespace lockstep
