// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Who keeps what under a job's policies, as constants.

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "lockstep/bucket/buckets.hpp"
#include "lockstep/bucket/frozen.hpp"
#include "lockstep/comm/backend.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/device/device.hpp"
#include "lockstep/hook/hook.hpp"
#include "lockstep/optim/sharding.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/strategy/feature/join.hpp"
#include "lockstep/strategy/policies.hpp"
#include "lockstep/strategy/sharding/shards.hpp"
#include "lockstep/topology/world.hpp"

namespace lockstep::detail {

/// Do ranks share a host's memory, as replicas of one process always do?
template <class StrategyPolicy, class DevicePolicy, class BackendPolicy>
inline constexpr bool shares_memory = std::is_same_v<DevicePolicy, Device<Cpu>> &&
                                      (std::is_same_v<BackendPolicy, Backend<Shm>> ||
                                       std::is_same_v<StrategyPolicy, ParallelStrategy<DP>>);

template <class Policies>
struct ShardingTraits {
 private:
  using Given = Pick<axes::Sharding, Policies>;
  static constexpr bool in_common_memory =
      shares_memory<Pick<axes::ParallelStrategy, Policies>, Pick<axes::Device, Policies>,
                    Pick<axes::Backend, Policies>>;
  static constexpr bool alone = Pick<axes::World, Policies>::static_size == 1;
  static constexpr bool is_zero = !alone && std::is_same_v<typename Given::choice, ZeroRedundancy>;
  /// Gradients that travel in a smaller type than the parameters' need slices of more bytes.
  using precision = typename Pick<axes::Precision, Policies>::choice;
  static constexpr std::size_t room =
      element_size(precision::parameter_types::of(ElementKind::f32)) >
              sizeof(typename precision::template reduced<float>)
          ? 2 * shard_room
          : shard_room;
  template <class What>
  static constexpr bool is_zero_of = is_zero && std::is_same_v<typename Given::what, What>;

 public:
  /// May ranks be through while others still have batches? Then flags travel with the first
  /// bucket, in the room behind it.
  static constexpr bool joins = !alone && Pick<axes::UnevenInputs, Policies>::joins;
  /// Do parameters lie in memory that all ranks have in common? There `ZeroRedundancy` of states is
  /// what `HostShared` is: each rank keeps the states of its slice, and nothing is gathered. Hooks
  /// and ranks that are through want buckets that are reduced.
  static constexpr bool shares_parameters =
      !alone && (std::is_same_v<typename Given::choice, HostShared> ||
                 (in_common_memory && is_zero_of<States> && !joins &&
                  !Pick<axes::Hooks, Policies>::has_stages));
  /// Are buckets cut into slices that are scattered and gathered, one for each rank?
  static constexpr bool shards = is_zero && !shares_parameters;
  /// Are gradients given away that a rank does not own?
  static constexpr bool frees_gradients = is_zero_of<Gradients>;

  static constexpr std::size_t join_flags =
      joins ? join_flags_for(Pick<axes::World, Policies>::static_size) : 0;

  using plan_rules = PlanRules<Pick<axes::Buckets, Policies>, Pick<axes::Frozen, Policies>,
                               std::max(shards ? room : 0, align_up(join_flags * sizeof(double)))>;
};

}  // namespace lockstep::detail
