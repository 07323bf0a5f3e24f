// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `DistributedDataParallel`: DDP for hand-written loops, and the communicators that policies
/// name.

#include <cstddef>
#include <type_traits>

#include "lockstep/comm/loopback.hpp"
#include "lockstep/comm/process_group.hpp"
#include "lockstep/comm/shm/communicator.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/strategy/ddp.hpp"
#include "lockstep/trainer/axes.hpp"
#include "lockstep/trainer/composition.hpp"

namespace lockstep {

/// What this version can run; the rest composes, and has a layout and a fingerprint.
template <class Policies>
inline constexpr bool trains =
    std::is_same_v<Pick<axes::ParallelStrategy, Policies>, ParallelStrategy<DDP>> &&
    std::is_same_v<Pick<axes::Device, Policies>, Device<Cpu>> &&
    (std::is_same_v<Pick<axes::Backend, Policies>, Backend<Shm>> ||
     Pick<axes::World, Policies>::static_size == 1);

/// The communicator of a job's backend, world and progress policies.
template <class Policies>
using CommunicatorOf =
    std::conditional_t<Pick<axes::World, Policies>::static_size == 1, LoopbackCommunicator,
                       ShmCommunicator<Pick<axes::World, Policies>::static_size,
                                       typename Pick<axes::Progress, Policies>::choice>>;

/// **Ranks** all. **Host** blocks until all have come.
template <class Policies>
CommunicatorOf<Policies> make_communicator(Session& session) {
  constexpr std::size_t ranks = Pick<axes::World, Policies>::static_size;
  if constexpr (ranks == 1) {
    require_world<1>(session.world(), session.rank());
    return {};
  } else {
    return make_shm_communicator<ranks, typename Pick<axes::Progress, Policies>::choice>(
        session.membership(), session.store());
  }
}

/// Stands for a wrapper whose composition was rejected.
struct RejectedDdp {};

namespace detail {
template <class Model, class... Ps>
consteval auto compose_ddp() {
  if constexpr (!require_composition<Model, Ps...>()) {
    return std::type_identity<RejectedDdp>{};
  } else {
    using Policies = CanonicalPolicies<Ps...>;
    static_assert(trains<Policies>,
                  "lockstep: this version trains with ParallelStrategy<DDP>, Device<Cpu> and "
                  "Backend<Shm>; README.md says what works");
    return std::type_identity<BasicDdp<Model, Policies, CommunicatorOf<Policies>>>{};
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
