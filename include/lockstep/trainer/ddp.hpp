// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `DistributedDataParallel`: DDP for hand-written loops.

#include <type_traits>

#include "lockstep/strategy/ddp.hpp"
#include "lockstep/trainer/axes.hpp"
#include "lockstep/trainer/composition.hpp"
#include "lockstep/trainer/connection.hpp"

namespace lockstep {

/// Stands for a wrapper whose composition was rejected.
struct RejectedDdp {};

namespace detail {
template <class Model, class... Ps>
consteval auto compose_ddp() {
  if constexpr (!require_composition<Model, Ps...>()) {
    return std::type_identity<RejectedDdp>{};
  } else {
    using Policies = CanonicalPolicies<Ps...>;
    static_assert(!is_dp<Policies>,
                  "lockstep: DistributedDataParallel is ParallelStrategy<DDP>; the wrapper of "
                  "ParallelStrategy<DP> is DataParallel");
    static_assert(trains<Policies>(),
                  "lockstep: this version does not train with this strategy and backend; README.md "
                  "says what works");
    if constexpr (require_connection<Policies>()) {
      return std::type_identity<BasicDdp<Model, Policies, CommunicatorOf<Policies>>>{};
    } else {
      return std::type_identity<RejectedDdp>{};
    }
  }
}
}  // namespace detail

/// PyTorch's name, a model and policies in any order:
///
///     auto group = init_process_group();
///     DistributedDataParallel<Linear, Optimizer<AdamW>> ddp(*group);
///     ddp.forward(batch).backward().reduce().update();
template <class Model, class... Ps>
using DistributedDataParallel = typename decltype(detail::compose_ddp<Model, Ps...>())::type;

}  // namespace lockstep
