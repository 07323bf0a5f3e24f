// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `NoReduction`: gradients stay where they are, for measuring what their travel costs.

#include <span>
#include <string_view>

#include "lockstep/hook/hook.hpp"

namespace lockstep {

/// Every rank updates with its own gradients, as PyTorch's `noop_hook` leaves them. Ranks drift
/// apart: the difference of two step times is the use of it.
struct NoReduction {
  static constexpr std::string_view name = "NoReduction";
  static constexpr bool is_alone_of_its_kind = true;

  template <class T>
  struct Bucket {
    static constexpr void begin(std::span<T>, auto&) {}
    static constexpr void finish(std::span<T>, auto&) {}
  };
};

}  // namespace lockstep
