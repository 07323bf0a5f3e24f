// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `convert.hpp`.

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include "lockstep/core/convert.hpp"
#include "lockstep/core/error.hpp"

namespace lockstep::detail {

/// Calls `f(std::type_identity<T>{})` with the floating type behind a kind.
template <class F>
void with_floating(ElementKind kind, const F& f) {
  if (kind == ElementKind::f64) return f(std::type_identity<double>{});
  if (kind == ElementKind::f32) return f(std::type_identity<float>{});
  if (kind == ElementKind::f16) return f(std::type_identity<Half>{});
  if (kind == ElementKind::bf16) return f(std::type_identity<BFloat16>{});
  throw Error("convert", "elements of " + std::string(element_name(kind)) + " are not floating",
              "keep their type");
}

LOCKSTEP_INLINE void convert_elements(std::byte* to, ElementKind to_kind, const std::byte* from,
                                      ElementKind from_kind, std::size_t count) {
  if (to_kind == from_kind) {
    if (count != 0) std::memmove(to, from, count * element_size(to_kind));
    return;
  }
  with_floating(to_kind, [&]<class To>(std::type_identity<To>) {
    with_floating(from_kind, [&]<class From>(std::type_identity<From>) {
      if constexpr (!std::is_same_v<To, From>) {
        // Through memory of its own: compilers take pointers to two types for two memories.
        constexpr std::size_t most = 512;
        From some[most];
        for (std::size_t at = 0; at < count; at += most) {
          const std::size_t n = std::min(most, count - at);
          std::memcpy(some, from + at * sizeof(From), n * sizeof(From));
          To converted[most];
          convert(converted, some, n);
          std::memcpy(to + at * sizeof(To), converted, n * sizeof(To));
        }
      }
    });
  });
}

}  // namespace lockstep::detail
