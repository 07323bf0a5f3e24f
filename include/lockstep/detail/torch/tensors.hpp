// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file LibTorch's tensors in lockstep: namespaces, element types, batches, memory as a tensor.
///
/// A batch of at most eight tensors, also in nested structs, needs no declarations; others list
/// their fields: `friend void pack(auto& archive, Batch& b) { archive(b.inputs, b.labels); }`.

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>
#include <c10/util/accumulate.h>

#include "lockstep/detail/core/view.hpp"
#include "lockstep/detail/model/tensor_list.hpp"

namespace torch {}

namespace lockstep {

/// Names in here are found as `lockstep::X` and as `lockstep::torch::X`.
inline namespace torch_modules {}

/// An alias: a namespace would make `torch::Tensor` ambiguous after `using namespace lockstep`.
namespace torch = ::torch;

}  // namespace lockstep

namespace torch {

/// LibTorch's own names take precedence over names from a using-directive.
using namespace ::lockstep::torch_modules;

}  // namespace torch

namespace lockstep::detail {

/// The tensor types in the order of `ElementKind`.
inline constexpr at::ScalarType scalar_types[element_kinds] = {at::ScalarType::Undefined,
                                                               at::kDouble,
                                                               at::kFloat,
                                                               at::kHalf,
                                                               at::kBFloat16,
                                                               at::kChar,
                                                               at::kShort,
                                                               at::kInt,
                                                               at::kLong,
                                                               at::kByte,
                                                               at::kUInt16,
                                                               at::kUInt32,
                                                               at::kUInt64};

constexpr at::ScalarType scalar_type_of(ElementKind kind) {
  return scalar_types[static_cast<std::size_t>(kind)];
}

/// `unsupported` where lockstep has no such elements. Booleans are handled as bytes.
constexpr ElementKind kind_of(at::ScalarType type) {
  const auto* const found = std::ranges::find(scalar_types, type == at::kBool ? at::kByte : type);
  return found == std::end(scalar_types)
             ? ElementKind::unsupported
             : static_cast<ElementKind>(found - std::begin(scalar_types));
}

template <Element T>
inline constexpr at::ScalarType scalar_type = scalar_type_of(element_kind<T>());

/// The element types of a module's parameters, and of its buffers: also counts and masks.
template <Element... Ts>
struct TorchElements : ElementList<Ts..., std::int64_t, std::uint8_t> {
  static constexpr bool contains(ElementKind kind) {
    return std::ranges::find(TorchElements::kinds, kind) != TorchElements::kinds.end();
  }
  /// Calls `f(std::type_identity<T>{})` with the type of a kind, for any tensor.
  static void with(ElementKind kind, const auto& f) {
    with_one_of<Ts..., std::int64_t, std::uint8_t>(kind, f);
  }
  /// The same for parameters, without a branch if all have one type.
  static void with_parameter(ElementKind kind, const auto& f) {
    if constexpr (sizeof...(Ts) == 1) {
      (f(std::type_identity<Ts>{}), ...);
    } else {
      with_one_of<Ts...>(kind, f);
    }
  }

 private:
  template <class... Us, class F>
  static void with_one_of(ElementKind kind, const F& f) {
    static_cast<void>(((kind == element_kind<Us>() && (f(std::type_identity<Us>{}), true)) || ...));
  }
};
template <>
struct TorchElements<> : TorchElements<float> {};

static_assert(kind_of(scalar_type<float>) == ElementKind::f32);
static_assert(kind_of(scalar_type<std::int64_t>) == ElementKind::i64);
static_assert(kind_of(scalar_type<BFloat16>) == ElementKind::bf16);

inline constexpr auto no_archive = [](auto&...) {};

/// A type that lists its fields.
template <class B>
concept NamingFields = requires(B& batch) { pack(no_archive, batch); };

/// Converts to a tensor and to nothing that a tensor converts to.
struct OnlyTensor {
  template <std::same_as<at::Tensor> T>
  operator T() const;
};

template <class B, std::size_t... I>
constexpr bool is_made_of_tensors(std::index_sequence<I...>) {
  return requires { B{(static_cast<void>(I), OnlyTensor{})...}; };
}

inline constexpr std::size_t most_tensor_fields = 8;

/// The number of tensors in a struct, nested ones included; 0 if it has other fields or too many.
template <class B, std::size_t N = most_tensor_fields>
constexpr std::size_t tensor_field_count() {
  if constexpr (N == 0 || !std::is_aggregate_v<B> || std::is_array_v<B> ||
                requires { std::tuple_size<B>::value; }) {
    return 0;
  } else if constexpr (sizeof(B) == N * sizeof(at::Tensor)) {
    return is_made_of_tensors<B>(std::make_index_sequence<N>{}) ? N : 0;
  } else {
    return tensor_field_count<B, N - 1>();
  }
}

/// A struct of tensors only, which does not list them.
template <class B>
concept TensorStruct = !NamingFields<B> && tensor_field_count<B>() != 0;

/// The tensors of the struct, which are contiguous.
template <class B>
std::span<at::Tensor> tensors_of(B& batch) {
  return {reinterpret_cast<at::Tensor*>(&batch), tensor_field_count<B>()};
}

template <class B>
concept WithFields = NamingFields<B> || TensorStruct<B>;

template <WithFields B, class F>
  requires(!std::is_const_v<B>)
void for_each_field(B& batch, const F& f) {
  if constexpr (NamingFields<B>) {
    const auto walk = [&](auto&... fields) { (f(fields), ...); };
    pack(walk, batch);
  } else {
    for (at::Tensor& tensor : tensors_of(batch)) f(tensor);
  }
}
/// The same for const batches: `pack` takes its batch without const because it also unpacks.
template <WithFields B, class F>
void for_each_field(const B& batch, const F& f) {
  for_each_field(const_cast<B&>(batch),  // NOLINT(cppcoreguidelines-pro-type-const-cast)
                 [&]<class Field>(Field& field) { f(static_cast<const Field&>(field)); });
}

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

/// Contiguous elements: vectors, arrays, spans.
template <class R>
concept ElementRange = std::ranges::contiguous_range<R> && std::ranges::sized_range<R> &&
                       TensorElement<std::ranges::range_value_t<R>>;

/// lockstep's views and mdspans.
template <class V>
concept ElementView = requires(const V& view) {
  { V::rank() } -> std::convertible_to<std::size_t>;
  { view.extent(0) } -> std::convertible_to<std::size_t>;
  view.data_handle();
} && TensorElement<std::remove_cv_t<typename V::element_type>>;

/// Drops the constness of `data`: LibTorch has no tensors of constant memory.
template <class T>
void* untyped(T* data) {
  return const_cast<std::remove_const_t<T>*>(
      data);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
}

}  // namespace lockstep::detail

namespace lockstep {

inline namespace torch_modules {

/// A vector, an array or a span as a tensor of one dimension, or of the shape `sizes`, without a
/// copy: the memory must outlive the tensor, and constant elements must not be written.
template <class R>
  requires detail::ElementRange<R>
at::Tensor as_tensor(R&& elements, at::OptionalIntArrayRef shape = {}) {
  static_assert(std::ranges::borrowed_range<R>,
                "lockstep: as_tensor refers to memory, and this vector or array would be gone; "
                "give it a name first");
  const auto size = static_cast<std::int64_t>(std::ranges::size(elements));
  const at::IntArrayRef sizes = shape.value_or(at::IntArrayRef(&size, 1));
  const std::int64_t count = c10::multiply_integers(sizes);
  if (count != size)
    detail::fail("as_tensor",
                 {"the extents have room for ", count, " elements, and there are ", size},
                 "give extents whose product is the number of elements");
  return at::from_blob(detail::untyped(std::ranges::data(elements)), sizes,
                       at::TensorOptions(detail::scalar_type_for<std::ranges::range_value_t<R>>()));
}

/// A view or an mdspan as a tensor with its extents and strides.
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
    // LibTorch finds the index of the GPU from the address.
    if (std::is_same_v<typename V::memory, DeviceMemory>) options = options.device(at::kCUDA);
  }
  return at::from_blob(detail::untyped(view.data_handle()), at::IntArrayRef(sizes.data(), rank),
                       at::IntArrayRef(strides.data(), rank), options);
}

}  // namespace torch_modules

}  // namespace lockstep
