// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Elements in another type, on the host.

#include <cstddef>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// Elements as type To: through the types of their sums, and rounded once more at the end.
template <class To, class From>
constexpr void convert(To* to, const From* from, std::size_t count) {
  for (std::size_t i = 0; i != count; ++i)
    to[i] = static_cast<To>(static_cast<Accumulator<To>>(static_cast<Accumulator<From>>(from[i])));
}

/// The same for kinds that are known at run time: floating ones, or one kind, which is copied. The
/// two memories may end at the same byte, if the new elements are not the smaller ones.
void convert_elements(std::byte* to, ElementKind to_kind, const std::byte* from,
                      ElementKind from_kind, std::size_t count);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/core/convert.ipp"
#endif
