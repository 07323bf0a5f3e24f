// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The loss axis of `DP`: where the loss of a scattered batch is computed.

#include <string_view>

#include "lockstep/core/choice.hpp"

namespace lockstep {

namespace axes {
struct LossPlacement {
  static constexpr std::string_view name = "LossPlacement";
};
}  // namespace axes

/// On the output device, over the gathered outputs, as in PyTorch.
struct LossOnOutput : ValuePolicy<axes::LossPlacement> {
  static constexpr void fingerprint(Hash& hash) { hash.text("LossOnOutput"); }
};

/// On every replica, over its own share: no gather, no imbalance.
struct LossOnReplica : ValuePolicy<axes::LossPlacement> {
  static constexpr void fingerprint(Hash& hash) { hash.text("LossOnReplica"); }
};

}  // namespace lockstep
