// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The meaning of a job's policies for a replica, as constants.

#include "lockstep/bucket/buckets.hpp"
#include "lockstep/bucket/layout.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/bucket/step.hpp"
#include "lockstep/bucket/subgraphs.hpp"
#include "lockstep/comm/backend.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/checked.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/device/device.hpp"
#include "lockstep/hook/hook.hpp"
#include "lockstep/model/declaration.hpp"
#include "lockstep/model/model.hpp"
#include "lockstep/model/tensor_list.hpp"
#include "lockstep/optim/constants.hpp"
#include "lockstep/optim/optimizer.hpp"
#include "lockstep/optim/parameter_groups.hpp"
#include "lockstep/optim/schedule.hpp"
#include "lockstep/optim/update.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/strategy/feature/join.hpp"
#include "lockstep/strategy/policies.hpp"
#include "lockstep/strategy/sharding/sharding.hpp"
#include "lockstep/topology/groups.hpp"
#include "lockstep/topology/topology.hpp"

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

template <class Model, class Policies>
struct ReplicaTraits {
  using model = Model;
  using policies = Policies;

  template <class Axis>
  using policy = Pick<Axis, Policies>;
  template <class Axis>
  using choice = typename policy<Axis>::choice;

  using device = choice<axes::Device>;
  using memory = typename device::memory;
  using precision = choice<axes::Precision>;
  using parameter_types = typename precision::parameter_types;
  using buffer_types = typename precision::buffer_types;
  using sharding = ShardingTraits<Policies>;
  using plan_rules = typename sharding::plan_rules;
  using layout = Layout<Model, plan_rules, parameter_types>;
  using declared_layout = Layout<Model, plan_rules>;
  using buffer_layout = BufferLayout<Model, buffer_types>;
  using bare_step = BareStep<Model, plan_rules, memory, parameter_types, buffer_types>;
  using rule = choice<axes::Optimizer>;
  using curve = choice<axes::Schedule>;
  using groups = policy<axes::ParameterGroups>;
  using hooks = policy<axes::Hooks>;

  /// The groups of ranks that the job has.
  using job_topology =
      typename policy<axes::Groups>::template in_world<policy<axes::World>::static_size>;
  static constexpr bool has_job_groups = !std::is_same_v<job_topology, NoGroups>;

  /// For each parameter 1 if a rank has used it since the last update, else 0.
  using Usage = KeptTable<std::uint8_t, layout::count>;

  /// A world that the compiler knows to be of one.
  static constexpr bool alone = policy<axes::World>::static_size == 1;
  static constexpr bool shares_parameters = sharding::shares_parameters;
  static constexpr bool shards = sharding::shards;
  static constexpr bool frees_gradients = sharding::frees_gradients;
  /// Are they divided inside of each group, and groups replicas of each other?
  static constexpr bool shards_groups = shards && EvenTopology<job_topology>;
  /// Does a rank keep the states of some elements alone?
  static constexpr bool divides_states = shares_parameters || shards;
  /// May ranks be through while others still have batches? `may_join` is the policy's answer, also
  /// in a world of one.
  static constexpr bool may_join = policy<axes::UnevenInputs>::joins;
  static constexpr bool joins = sharding::joins;
  static constexpr std::size_t join_flags = sharding::join_flags;
  /// Are sums divided by the ranks that still have batches?
  static constexpr bool divides_by_live = joins && policy<axes::UnevenInputs>::divides_by_live;
  static constexpr std::size_t micro_batches = policy<axes::Accumulate>::micro_batches;
  static constexpr bool clips = policy<axes::Clip>::clips;
  /// Have sets of parameters numbers of their own?
  static constexpr bool has_groups = groups::count > 1;
  static constexpr bool captures = policy<axes::StepExecution>::captures;
  static constexpr bool keeps_masters = precision::keeps_masters;
  static constexpr bool scales_loss = precision::scales_loss;
  static constexpr bool stops_at_anomaly = std::is_same_v<choice<axes::Anomaly>, Stop>;
  static constexpr bool skips_anomalies = std::is_same_v<choice<axes::Anomaly>, Skip>;
  /// Does a missing gradient count as zero?
  static constexpr bool skips_unused = std::is_same_v<choice<axes::UnusedParameters>, Zero>;
  /// Does every step use one of the declared sets of parameters?
  using subgraphs = SubgraphsIn<choice<axes::UnusedParameters>>;
  static constexpr bool has_subgraphs = subgraphs::count > 1;
  /// Do gradients know which parameters a rank has used since the last update?
  static constexpr bool notes_usage = skips_unused || has_subgraphs;
  /// Are parameters left alone whose averaged gradient is zero?
  static constexpr bool skips_zero_gradients = policy<axes::Hooks>::skips_zero_gradients;
  /// Are there updates that leave parameters out? Then each has its own count of updates.
  static constexpr bool counts_updates = notes_usage || skips_zero_gradients;
  /// Do gradients travel through hooks? They do in a world of one as well.
  static constexpr bool is_hooked = hooks::has_stages;
  /// Do ranks update with their own gradients, and average parameters now and then?
  static constexpr bool averages_parameters = hooks::stages::averages_parameters;
  /// Are averages scattered, too? Hooks reduce whole buckets, of which a rank uses its slice.
  static constexpr bool scatters_buckets = shards && !is_hooked;
  /// Does the program run forward and backward passes by itself?
  static constexpr bool has_own_passes = requires { Model::has_own_passes; };
  /// Do the model's layers draw random numbers?
  static constexpr bool draws = Drawing<Model>;
  /// Do batch norms take their statistics over several ranks, and are these the group's?
  static constexpr bool syncs_norms = !alone && policy<axes::Norms>::is_synced;
  static constexpr bool syncs_norms_in_group = syncs_norms && policy<axes::Norms>::in_group;
  /// Does the step know the ranks of its norms, where these share statistics or may ask?
  static constexpr bool knows_norm_ranks = syncs_norms || (!alone && TensorListing<Model>);
  /// Are buffers the same on all ranks by themselves? They are where all of them are running
  /// statistics, which are taken over all ranks.
  static constexpr bool buffers_agree = [] {
    if constexpr (syncs_norms && !syncs_norms_in_group && !TensorListing<Model>) {
      return holds_only_norms<DeclaredList<Model, TensorRole::buffer>>();
    } else {
      return false;
    }
  }();
  static constexpr bool has_own_buffers = !alone && buffer_layout::count != 0 && !buffers_agree;
  /// Do all ranks get rank 0's before every forward pass?
  static constexpr bool broadcasts_buffers =
      has_own_buffers && std::is_same_v<choice<axes::Buffers>, Broadcast>;
  /// Are they averaged where a model is evaluated or saved, and at the end of an epoch?
  static constexpr bool averages_buffers =
      has_own_buffers && std::is_same_v<choice<axes::Buffers>, Synced>;
  static constexpr bool unites_buffers = broadcasts_buffers || averages_buffers;

  /// Are arriving gradients tracked? They are not with one rank and one batch a step, so that a
  /// step costs what the bare model costs. The checked mode looks at every one.
  static constexpr bool tracks =
      is_checked || !alone || micro_batches > 1 || notes_usage || is_hooked;

  /// Are gradients reduced at all?
  static constexpr bool reduces = !alone || is_hooked;
  /// Does the reduction of a bucket start with its last gradient, while backward continues? Where
  /// ranks share parameters the updater reduces instead, after backward: a rank that updates its
  /// slice must know that no other rank still reads it.
  static constexpr bool reduces_early = reduces && !shares_parameters;

  /// Does every rank have a share of one batch, as the replicas of DP do?
  static constexpr bool scatters = !alone && std::is_same_v<choice<axes::ParallelStrategy>, DP>;
  /// Is one loss taken of the outputs of all replicas? Then a replica's gradient is a part of that
  /// loss's gradient, and the parts are summed.
  static constexpr bool takes_loss_of_outputs =
      OutputDeclaring<Model> && std::is_same_v<policy<axes::LossPlacement>, LossOnOutput>;
  /// Do all ranks know which sub-graph each of them uses? Replicas of DP are told the same.
  static constexpr bool subgraphs_agree =
      has_subgraphs && (alone || scatters || subgraphs::same_on_all_ranks);
  /// Do ranks compare it, in the descriptions of their calls?
  static constexpr bool compares_subgraphs = subgraphs_agree && !alone && !scatters;

  static constexpr bool gathers_outputs = scatters && takes_loss_of_outputs;
  static constexpr bool sums_gradients = gathers_outputs;
  /// Otherwise a replica's gradient is that of the mean over its share. Shares can differ in size,
  /// so gradients are weighed before they are averaged.
  static constexpr bool weighs_shares = scatters && !gathers_outputs;

  /// The type in which gradients of T are reduced.
  template <class T>
  using travelling = std::conditional_t<alone, T, typename precision::template reduced<T>>;

  /// Where ranks own slices of buckets with parameters of T, these begin where 16 bytes of this
  /// type do, and so do those of parameters and of gradients.
  template <class T>
  using sliced = std::conditional_t<(sizeof(travelling<T>) < sizeof(T)), travelling<T>, T>;

  /// The element kinds of the parameters, as the model sees them.
  static constexpr const auto& kinds() {
    return kinds_of<Model, TensorRole::parameter, parameter_types>;
  }

  /// Calls `f(std::type_identity<T>{})` with the type behind a bucket's elements.
  template <class F>
  static constexpr void with_element(ElementKind kind, F&& f) {
    lockstep::detail::with_element<Model, TensorRole::parameter, parameter_types>(
        kind, std::forward<F>(f));
  }
};

/// The job's call that a step's collectives are part of: a pass, where the program runs passes by
/// itself. Where ranks compare sub-graphs, the replica has told the thread which are used.
template <class Traits, JobCall Pass = JobCall::step>
constexpr JobCall step_call() {
  if constexpr (Traits::compares_subgraphs) return job_call_of_thread();
  if constexpr (Traits::has_own_passes) return Pass;
  return JobCall::step;
}

/// Where a model's parameters and buffers lie.
template <class Traits>
struct TensorLayouts {
  explicit TensorLayouts(const typename Traits::model& model) : parameters(model), buffers(model) {}

  [[no_unique_address]] typename Traits::layout parameters;
  [[no_unique_address]] typename Traits::buffer_layout buffers;
};

}  // namespace lockstep::detail
