// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `DataParallel`: DP for hand-written loops.

#include <type_traits>

#include "lockstep/strategy/dp.hpp"
#include "lockstep/trainer/axes.hpp"
#include "lockstep/trainer/composition.hpp"
#include "lockstep/trainer/connection.hpp"
#include "lockstep/trainer/replica_meeting.hpp"

namespace lockstep {

/// Stands for a wrapper whose composition was rejected.
struct RejectedDp {};

namespace detail {
template <class Model, class... Ps>
consteval auto compose_dp() {
  if constexpr (!require_composition<Model, Ps...>()) {
    return std::type_identity<RejectedDp>{};
  } else {
    using Policies = CanonicalPolicies<Ps...>;
    if constexpr (require_connection<Policies>()) {
      return std::type_identity<BasicDp<Model, Policies, ReplicaMeetingOf<Policies>>>{};
    } else {
      return std::type_identity<RejectedDp>{};
    }
  }
}
}  // namespace detail

/// PyTorch's name, a model and policies in any order:
///
///     DataParallel<Linear, Optimizer<AdamW>> dp;                 // all devices of this process
///     DataParallel<Linear, Optimizer<AdamW>> two({.replicas = 2});
///     dp.step(batch);
template <class Model, class... Ps>
using DataParallel =
    typename decltype(detail::compose_dp<Model, ParallelStrategy<DP>, Ps...>())::type;

}  // namespace lockstep
