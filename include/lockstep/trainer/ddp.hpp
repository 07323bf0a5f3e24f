// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `DistributedDataParallel`: DDP for hand-written loops, and the communicators that policies
/// name.

#include <cstddef>
#include <type_traits>

#include "lockstep/comm/loopback.hpp"
#include "lockstep/comm/process_group.hpp"
#include "lockstep/comm/shm/communicator.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/strategy/ddp.hpp"
#include "lockstep/trainer/axes.hpp"
#include "lockstep/trainer/composition.hpp"

namespace lockstep {

/// The communicator of a job's backend, world and progress policies.
template <class Policies>
using CommunicatorOf =
    std::conditional_t<Pick<axes::World, Policies>::static_size == 1, LoopbackCommunicator,
                       ShmCommunicator<Pick<axes::World, Policies>::static_size,
                                       typename Pick<axes::Progress, Policies>::choice>>;

namespace detail {
template <class Model, class... Ps>
consteval auto compose_ddp() {
  if constexpr (require_composition<Model, Ps...>()) {
    using Policies = CanonicalPolicies<Ps...>;
    return std::type_identity<BasicDdp<Model, Policies, CommunicatorOf<Policies>>>{};
  } else {
    return std::type_identity<void>{};
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
