// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Memory of the program's as a tensor, without a copy.

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <ranges>
#include <span>
#include <type_traits>
#include <vector>

#include "lockstep/core/element.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/torch/elements.hpp"
#include "lockstep/torch/namespace.hpp"

namespace lockstep {

namespace detail {

/// An element of lockstep's, or `bool`.
template <class T>
concept TensorElement = Element<T> || std::is_same_v<T, bool>;

template <TensorElement T>
constexpr at::ScalarType scalar_type_for() {
  if constexpr (std::is_same_v<T, bool>) {
    return at::kBool;
  } else {
    return scalar_type<T>;
  }
}

/// Vectors, arrays, spans: elements one behind the other.
template <class R>
concept ElementRange = std::ranges::contiguous_range<R> && std::ranges::sized_range<R> &&
                       TensorElement<std::ranges::range_value_t<R>>;

/// Views of lockstep's and mdspans.
template <class V>
concept ElementView = requires(const V& view) {
  { V::rank() } -> std::convertible_to<std::size_t>;
  { view.extent(0) } -> std::convertible_to<std::size_t>;
  view.data_handle();
} && TensorElement<std::remove_cv_t<typename V::element_type>>;

/// Tensors do not know memory that must not be written, so the constness of `data` is lost.
template <class T>
void* untyped(T* data) {
  return const_cast<std::remove_const_t<T>*>(
      data);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
}

}  // namespace detail

inline namespace torch_modules {

/// A vector, an array or a span as a tensor of one extent, or of the extents in `sizes`. Nothing is
/// copied: the memory must live as long as the tensor is used, and a tensor of constant elements
/// must not be written.
template <class R>
  requires detail::ElementRange<R>
at::Tensor as_tensor(R&& elements, at::IntArrayRef sizes) {
  static_assert(std::ranges::borrowed_range<R>,
                "lockstep: as_tensor refers to memory, and this vector or array would be gone; "
                "give it a name first");
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  if (count != static_cast<std::int64_t>(std::ranges::size(elements)))
    detail::fail("as_tensor",
                 {"the extents have room for ", count, " elements, and there are ",
                  std::ranges::size(elements)},
                 "give extents whose product is the number of elements");
  return at::from_blob(detail::untyped(std::ranges::data(elements)), sizes,
                       at::TensorOptions(detail::scalar_type_for<std::ranges::range_value_t<R>>()));
}
template <class R>
  requires detail::ElementRange<R>
at::Tensor as_tensor(R&& elements) {
  const auto size = static_cast<std::int64_t>(std::ranges::size(elements));
  return as_tensor(std::forward<R>(elements), at::IntArrayRef(&size, 1));
}

/// A view or an mdspan as a tensor of its extents and strides.
template <detail::ElementView V>
at::Tensor as_tensor(const V& view) {
  constexpr std::size_t rank = V::rank();
  std::array<std::int64_t, rank + 1> sizes{};
  std::array<std::int64_t, rank + 1> strides{};
  std::int64_t stride = 1;
  for (std::size_t axis = rank; axis-- != 0;) {
    sizes[axis] = static_cast<std::int64_t>(view.extent(axis));
    strides[axis] = stride;
    stride *= sizes[axis];
    if constexpr (requires { view.stride(axis); })
      strides[axis] = static_cast<std::int64_t>(view.stride(axis));
  }
  at::TensorOptions options(detail::scalar_type_for<std::remove_cv_t<typename V::element_type>>());
  if constexpr (requires { typename V::memory; }) {
    // LibTorch finds out itself which GPU has the memory.
    if (std::is_same_v<typename V::memory, DeviceMemory>) options = options.device(at::kCUDA);
  }
  return at::from_blob(detail::untyped(view.data_handle()), at::IntArrayRef(sizes.data(), rank),
                       at::IntArrayRef(strides.data(), rank), options);
}

}  // namespace torch_modules

}  // namespace lockstep
