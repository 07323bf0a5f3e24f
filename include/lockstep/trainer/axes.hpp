// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file All axes of a job: their canonical order, and the policy each has when none is given.

#include <type_traits>

#include "lockstep/bucket/buckets.hpp"
#include "lockstep/bucket/frozen.hpp"
#include "lockstep/comm/backend.hpp"
#include "lockstep/comm/progress.hpp"
#include "lockstep/data/feed_policy.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/device/device.hpp"
#include "lockstep/hook/hooks.hpp"
#include "lockstep/optim/adam.hpp"
#include "lockstep/optim/anomaly.hpp"
#include "lockstep/optim/clip.hpp"
#include "lockstep/optim/optimizer.hpp"
#include "lockstep/optim/parameter_groups.hpp"
#include "lockstep/optim/schedule.hpp"
#include "lockstep/optim/sgd.hpp"
#include "lockstep/optim/sharding.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/policy/policy.hpp"
#include "lockstep/strategy/policies.hpp"
#include "lockstep/strategy/precision.hpp"
#include "lockstep/strategy/sharding_traits.hpp"
#include "lockstep/topology/groups.hpp"
#include "lockstep/topology/world.hpp"

namespace lockstep {

namespace detail {

/// One default per axis. Two depend on other policies: the ranks of a GPU job communicate through
/// NCCL unless told otherwise, so that `Device<Cuda>` alone moves a job to GPUs; and where memory
/// is shared, parameters live in it once, unless hooks want whole buckets or ranks may
/// be through before others.
template <class StrategyPolicy, class DevicePolicy, class BackendPolicy, class HooksPolicy,
          class UnevenPolicy>
using DefaultPolicies = PolicyPack<
    StrategyPolicy, DevicePolicy, BackendPolicy, World<dynamic>, Sampler<Distributed, Padding>,
    Optimizer<SGD>, ParameterGroups<>, Schedule<Constant>, Frozen<>, Buckets<>, Accumulate<1>,
    Clip<>, Buffers<Broadcast>, Norms<Local>, UnusedParameters<Forbid>, UnevenInputs<Even>,
    Precision<AsDeclared>, EagerStep, LossOnOutput,
    Sharding<std::conditional_t<shares_memory<StrategyPolicy, DevicePolicy, BackendPolicy> &&
                                    !HooksPolicy::has_stages && !UnevenPolicy::joins,
                                HostShared, Replicated>>,
    Hooks<>, Progress<Callers>, Anomaly<Stop>, Groups<>, Feed<Own>>;

template <class... Ps>
struct DefaultsFor {
  using StrategyPolicy = PickOr<ParallelStrategy<DDP>, Ps...>;
  using DevicePolicy = PickOr<Device<Cpu>, Ps...>;
  static constexpr bool has_gpu_ranks = std::is_same_v<DevicePolicy, Device<Cuda>> &&
                                        std::is_same_v<StrategyPolicy, ParallelStrategy<DDP>>;
  using BackendPolicy = PickOr<Backend<std::conditional_t<has_gpu_ranks, Nccl, Shm>>, Ps...>;
  using type = DefaultPolicies<StrategyPolicy, DevicePolicy, BackendPolicy, PickOr<Hooks<>, Ps...>,
                               PickOr<UnevenInputs<Even>, Ps...>>;
};

}  // namespace detail

/// One policy per axis, in canonical order, whatever the order of the given ones.
template <class... Ps>
using CanonicalPolicies = detail::Canonical<typename detail::DefaultsFor<Ps...>::type, Ps...>;

namespace detail {
template <class... Ps>
consteval bool all_policies(PolicyPack<Ps...>) {
  return (Policy<Ps> && ...);
}
}  // namespace detail

static_assert(detail::all_policies(CanonicalPolicies<>{}));

}  // namespace lockstep
