// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The sharding axis: who keeps which parameters and optimizer states.

#include <string_view>
#include <type_traits>

#include "lockstep/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Sharding : WithName<"Sharding"> {};
struct Sharded : WithName<"Sharded"> {};
}  // namespace axes

/// Every rank keeps all parameters and states.
struct Replicated : WithName<"Replicated">, Choice<axes::Sharding> {};

/// Parameters live once per host; each rank keeps the states of its slice, and updates the slice in
/// the pass that reduces it. The default where memory is shared.
struct HostShared : WithName<"HostShared">, Choice<axes::Sharding> {};

/// Each rank keeps and updates its share of the optimizer's states (ZeRO), on any backend; what is
/// shared out, and how, is said beside it: `Sharding<ZeroRedundancy, Gradients>`.
struct ZeroRedundancy : WithName<"ZeroRedundancy">, Choice<axes::Sharding> {};

/// `ZeroRedundancy` of states (and weights of higher precision): every bucket is cut into equal
/// slices, one for each rank. Gradients stay whole. The default.
struct States : WithName<"States">, Choice<axes::Sharded> {};

/// The same slices, and a rank keeps the gradients of its own slices alone: others' are given away
/// as soon as a bucket is reduced.
struct Gradients : WithName<"Gradients">, Choice<axes::Sharded> {};

/// Left out: ranks that own whole parameters were slower than replicas. The name stays, so that
/// asking for it is one sentence of the compiler.
struct ByTensor;

/// The policy that says what each rank keeps and updates: `Sharding<Replicated>`,
/// `Sharding<ZeroRedundancy>`, `Sharding<ZeroRedundancy, Gradients>`.
template <class How, class What = States>
struct Sharding : detail::ChoicePolicy<axes::Sharding, How> {
  using what = What;
  static constexpr bool well_formed =
      detail::ChoiceOf<How, axes::Sharding> && detail::ChoiceOf<What, axes::Sharded> &&
      (std::is_same_v<How, ZeroRedundancy> || std::is_same_v<What, States>);
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Sharding::name).text(How::name);
    if constexpr (!std::is_same_v<What, States>) hash.text(What::name);
  }
};

}  // namespace lockstep
