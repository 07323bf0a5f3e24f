// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `dynamic`: a size known only at run time, wherever a size is a template argument.

#include <cstddef>

#include "lockstep/core/macros.hpp"

namespace lockstep {

/// Stands for "known at construction": `World<dynamic>`, `Grid<dynamic, 4>`,
/// `Parameter<"w", float, dynamic, 784>`. The same value as `std::dynamic_extent`.
inline constexpr std::size_t dynamic = static_cast<std::size_t>(-1);

/// A size that costs no storage when the compiler knows it.
template <std::size_t N>
struct Size {
  constexpr Size() = default;
  LOCKSTEP_HOST_DEVICE static constexpr std::size_t value() { return N; }
};

template <>
struct Size<dynamic> {
  constexpr explicit Size(std::size_t size) : size_(size) {}
  LOCKSTEP_HOST_DEVICE constexpr std::size_t value() const { return size_; }

 private:
  std::size_t size_;
};

namespace detail {

/// `size`, unless the compiler knows it.
template <std::size_t N>
constexpr Size<N> make_size(std::size_t size) {
  if constexpr (N == dynamic) {
    return Size<N>(size);
  } else {
    return {};
  }
}

}  // namespace detail

}  // namespace lockstep
