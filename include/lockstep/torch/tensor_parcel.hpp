// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Tensors in what is fed to other ranks, and in what is shared out among replicas.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/data/serialize.hpp"
#include "lockstep/strategy/scatter.hpp"
#include "lockstep/torch/tensor_fields.hpp"

namespace lockstep::detail {

/// Does nobody else look at a tensor's memory: no graph that was kept, no slice, no copy?
inline bool is_ours_alone(const at::Tensor& tensor) {
  return tensor.defined() && tensor.use_count() == 1 && tensor.is_contiguous() &&
         !tensor.requires_grad() && tensor.is_cpu() && tensor.storage().use_count() == 1;
}

/// Makes `tensor` a contiguous one of this type and these sizes with any elements, in the memory
/// that it has if nobody else looks at that.
inline void make_room(at::Tensor& tensor, at::ScalarType type, at::IntArrayRef sizes) {
  if (is_ours_alone(tensor) && tensor.scalar_type() == type) {
    if (tensor.sizes() != sizes) tensor.resize_(sizes);
  } else {
    tensor = at::empty(sizes, at::TensorOptions(type));
  }
}

/// Its type, its extents and its elements row by row; where they lay is not told.
inline void pack(ParcelWriter& parcel, at::Tensor& tensor) {
  auto type = static_cast<std::int8_t>(tensor.scalar_type());
  if (!tensor.defined()) type = static_cast<std::int8_t>(at::ScalarType::Undefined);
  parcel(type);
  if (!tensor.defined()) return;
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  parcel(sizes);
  const at::Tensor rows = tensor.detach().cpu().contiguous();
  parcel.reserve(rows.nbytes(), 1);
  if (rows.nbytes() != 0) parcel.bytes(rows.const_data_ptr(), rows.nbytes());
}

inline void pack(ParcelReader& parcel, at::Tensor& tensor) {
  std::int8_t type = 0;
  parcel(type);
  if (type == static_cast<std::int8_t>(at::ScalarType::Undefined)) {
    tensor = at::Tensor();
    return;
  }
  std::vector<std::int64_t> sizes;
  parcel(sizes);
  const std::size_t bytes = parcel.reserve(0, 1);
  bool fits = type >= 0 && type < static_cast<std::int8_t>(at::ScalarType::NumOptions);
  const auto scalar = static_cast<at::ScalarType>(type);
  std::uint64_t wanted = fits ? c10::elementSize(scalar) : 0;
  for (const std::int64_t size : sizes)
    fits = fits && size >= 0 &&
           !__builtin_mul_overflow(wanted, static_cast<std::uint64_t>(size), &wanted);
  if (!fits || wanted != bytes)
    fail("feed", {"a parcel does not hold a tensor here"},
         "let all ranks run the same program, and pack and unpack the same fields");
  make_room(tensor, scalar, sizes);
  if (bytes != 0) parcel.bytes(tensor.mutable_data_ptr(), bytes);
}

/// A struct's own `pack` is preferred to this one, since it is for one type.
template <class Way, class B>
  requires std::derived_from<Way, Parcel<Way>> && (is_tensor_struct<B>())
void pack(Way& parcel, B& batch) {
  std::apply(parcel, members_of<tensor_field_count<B>()>(batch));
}

/// A tensor is cut along its first extent, and its shares are views of it. One without extents is
/// shared.
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

/// A struct is cut by its fields, as Python's DataParallel cuts: each along its own first extent.
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

}  // namespace lockstep::detail
