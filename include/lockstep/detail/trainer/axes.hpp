// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file All axes of a job: their canonical order and their default policies.

#include "lockstep/detail/data/feed.hpp"
#include "lockstep/detail/observe/observers.hpp"
#include "lockstep/detail/optim/adam.hpp"
#include "lockstep/detail/optim/sgd.hpp"
#include "lockstep/detail/strategy/replica_traits.hpp"

namespace lockstep {

namespace detail {

template <class Choice>
inline constexpr bool is_mpi = std::is_same_v<Choice, Mpi> || std::is_same_v<Choice, MpiAnyOrder>;

/// Do ranks, or ranks of different hosts, communicate through MPI?
template <class Choice>
inline constexpr bool uses_mpi = is_mpi<Choice>;
template <class Inside, class Between>
inline constexpr bool uses_mpi<Hierarchical<Inside, Between>> = is_mpi<Between>;

/// Is this no hierarchy, or one that the library has?
template <class Choice>
inline constexpr bool is_connectable = true;
template <class Inside, class Between>
inline constexpr bool is_connectable<Hierarchical<Inside, Between>> =
    std::is_same_v<Inside, Shm>
        ? is_mpi<Between> || std::is_same_v<Between, Gloo> || std::is_same_v<Between, Nccl>
        : std::is_same_v<Inside, Nccl> && is_mpi<Between>;

/// One default per axis. Three depend on other policies: ranks on GPUs communicate through NCCL, so
/// that `Device<Cuda>` alone moves a job to GPUs; ranks with common memory share parameters, unless
/// hooks need whole buckets or `UnevenInputs<Join>` is given; and a thread advances MPI's calls,
/// which no other thread does.
template <class... Ps>
struct DefaultsFor {
  using StrategyPolicy = PickOr<ParallelStrategy<DDP>, Ps...>;
  using DevicePolicy = PickOr<Device<Cpu>, Ps...>;
  static constexpr bool has_gpu_ranks = std::is_same_v<DevicePolicy, Device<Cuda>> &&
                                        std::is_same_v<StrategyPolicy, ParallelStrategy<DDP>>;
  using DefaultBackend = Backend<std::conditional_t<has_gpu_ranks, Nccl, Shm>>;
  using BackendPolicy = PickOr<DefaultBackend, Ps...>;
  using DefaultProgress =
      Progress<std::conditional_t<is_mpi<typename BackendPolicy::choice>, HelperThread, Callers>>;
  static constexpr bool shares_parameters =
      shares_memory<StrategyPolicy, DevicePolicy, BackendPolicy> &&
      !PickOr<Hooks<>, Ps...>::has_stages && !PickOr<UnevenInputs<Even>, Ps...>::joins;
  using type =
      PolicyPack<ParallelStrategy<DDP>, Device<Cpu>, DefaultBackend, World<dynamic>,
                 Sampler<Distributed, Padding>, Optimizer<SGD>, ParameterGroups<>,
                 Schedule<Constant>, Frozen<>, Buckets<>, Accumulate<1>, Clip<>, Buffers<Broadcast>,
                 Norms<Local>, UnusedParameters<Forbid>, UnevenInputs<Even>, Precision<AsDeclared>,
                 EagerStep, LossOnOutput,
                 Sharding<std::conditional_t<shares_parameters, HostShared, Replicated>>, Hooks<>,
                 DefaultProgress, Anomaly<Stop>, Groups<>, Feed<Own>, Observers<>>;
};

/// Do ranks, those of a host or those of different hosts, communicate through NCCL?
template <class Choice>
inline constexpr bool uses_nccl = std::is_same_v<Choice, Nccl>;
template <class Inside, class Between>
inline constexpr bool uses_nccl<Hierarchical<Inside, Between>> =
    uses_nccl<Inside> || uses_nccl<Between>;

}  // namespace detail

/// A job's policies: `pack` has one per axis, in canonical order. Only policies that are not the
/// default are in the type's name, which is part of the name of every function of the job.
template <class... Chosen>
struct JobPolicies {
  using pack = detail::Canonical<typename detail::DefaultsFor<Chosen...>::type, Chosen...>;
};

/// The same type for any order of the same policies, and for a default that is spelled out.
template <class... Ps>
using CanonicalPolicies =
    detail::ChosenFrom<JobPolicies, typename detail::DefaultsFor<Ps...>::type,
                       detail::Canonical<typename detail::DefaultsFor<Ps...>::type, Ps...>>;

static_assert([]<class... Ps>(PolicyPack<Ps...>) {
  return (detail::Policy<Ps> && ...);
}(CanonicalPolicies<>::pack{}));

}  // namespace lockstep
