// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The tensors of a batch, whatever struct it is.
///
/// A struct that has tensors and nothing else, eight at most, needs nothing:
///
///     struct Images { torch::Tensor inputs, labels; };
///
/// Others name their fields once, for all that is done with them (data/parcel.hpp):
///
///     friend void pack(auto& parcel, Batch& batch) { parcel(batch.inputs, batch.labels); }

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

namespace lockstep::detail {

/// A parcel to which nothing happens.
struct NoParcel {
  template <class... Fields>
  void operator()(Fields&...) {}
};

/// A type that names its fields.
template <class B>
concept NamingFields = requires(NoParcel& parcel, B& batch) { pack(parcel, batch); };

/// A tensor, for expansions by number. (nvcc writes an alias out before the expansion, which then
/// has nothing to expand.)
template <std::size_t>
at::Tensor some_tensor();

/// Whether `B` can be made from so many tensors, where nested structs count as what is in them, and
/// where each of them is one member.
template <class B, std::size_t... I>
constexpr bool is_made_flat(std::index_sequence<I...>) {
  return requires { B{some_tensor<I>()...}; };
}
template <class B, std::size_t... I>
constexpr bool is_made_by_members(std::index_sequence<I...>) {
  return requires { B{{some_tensor<I>()}...}; };
}

inline constexpr std::size_t most_tensor_fields = 8;

/// The number of members of a struct of tensors; 0 where it is none, or has too many or others.
template <class B, std::size_t N = most_tensor_fields + 1>
constexpr std::size_t tensor_field_count() {
  if constexpr (N == 0 || !std::is_aggregate_v<B> || std::is_array_v<B>) {
    return 0;
  } else if constexpr (!is_made_flat<B>(std::make_index_sequence<N>{})) {
    return tensor_field_count<B, N - 1>();
  } else if constexpr (N > most_tensor_fields || sizeof(B) != N * sizeof(at::Tensor) ||
                       !is_made_by_members<B>(std::make_index_sequence<N>{})) {
    return 0;
  } else {
    return N;
  }
}

/// References to the members of a struct that has so many.
template <std::size_t N, class B>
auto members_of(B& b) {
  if constexpr (N == 1) {
    auto& [x0] = b;
    return std::tie(x0);
  } else if constexpr (N == 2) {
    auto& [x0, x1] = b;
    return std::tie(x0, x1);
  } else if constexpr (N == 3) {
    auto& [x0, x1, x2] = b;
    return std::tie(x0, x1, x2);
  } else if constexpr (N == 4) {
    auto& [x0, x1, x2, x3] = b;
    return std::tie(x0, x1, x2, x3);
  } else if constexpr (N == 5) {
    auto& [x0, x1, x2, x3, x4] = b;
    return std::tie(x0, x1, x2, x3, x4);
  } else if constexpr (N == 6) {
    auto& [x0, x1, x2, x3, x4, x5] = b;
    return std::tie(x0, x1, x2, x3, x4, x5);
  } else if constexpr (N == 7) {
    auto& [x0, x1, x2, x3, x4, x5, x6] = b;
    return std::tie(x0, x1, x2, x3, x4, x5, x6);
  } else if constexpr (N == 8) {
    auto& [x0, x1, x2, x3, x4, x5, x6, x7] = b;
    return std::tie(x0, x1, x2, x3, x4, x5, x6, x7);
  } else {
    return std::tie();
  }
}

template <class Members>
inline constexpr bool are_tensors = false;
template <class... Ts>
inline constexpr bool are_tensors<std::tuple<Ts&...>> =
    sizeof...(Ts) != 0 && (std::is_same_v<Ts, at::Tensor> && ...);

template <class B>
constexpr bool is_tensor_struct() {
  if constexpr (std::is_class_v<B> && !std::is_same_v<B, at::Tensor> &&
                !requires { std::tuple_size<B>::value; }) {
    return are_tensors<decltype(members_of<tensor_field_count<B>()>(std::declval<B&>()))>;
  } else {
    return false;
  }
}

/// A struct that has tensors and nothing else, and does not name them.
template <class B>
concept TensorStruct = !NamingFields<B> && is_tensor_struct<B>();

/// A batch whose fields can be walked over.
template <class B>
concept WithFields = NamingFields<B> || TensorStruct<B>;

/// Calls `f(field)` for each field.
template <WithFields B, class F>
  requires(!std::is_const_v<B>)
void for_each_field(B& batch, const F& f) {
  if constexpr (NamingFields<B>) {
    const auto walk = [&](auto&... fields) { (f(fields), ...); };
    pack(walk, batch);
  } else {
    std::apply([&](auto&... fields) { (f(fields), ...); },
               members_of<tensor_field_count<B>()>(batch));
  }
}
/// The same with fields that must not be changed: a `pack` takes its batch without const because it
/// also unpacks.
template <WithFields B, class F>
void for_each_field(const B& batch, const F& f) {
  for_each_field(const_cast<B&>(batch),  // NOLINT(cppcoreguidelines-pro-type-const-cast)
                 [&]<class Field>(Field& field) { f(static_cast<const Field&>(field)); });
}

}  // namespace lockstep::detail
