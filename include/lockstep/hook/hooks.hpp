// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The hooks axis: changes to gradients on their way through a reduction.

#include <string_view>

#include "lockstep/core/choice.hpp"
#include "lockstep/hook/skip_zero_gradients.hpp"

namespace lockstep {

namespace axes {
struct Hooks {
  static constexpr std::string_view name = "Hooks";
};
}  // namespace axes

/// Gradient hooks, applied from left to right: compression, quantisation, a user's own.
template <class... Pipeline>
struct Hooks : detail::ValuePolicy<axes::Hooks> {
  /// Are parameters left alone whose averaged gradient is zero?
  static constexpr bool skips_zero_gradients = (detail::filters_updates<Pipeline> || ...);
  static constexpr bool built() { return (detail::filters_updates<Pipeline> && ...); }
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Hooks::name);
    (hash.text(Pipeline::name), ...);
  }
};

}  // namespace lockstep
