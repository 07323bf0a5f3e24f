// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The meaning of a job's policies for a replica, as constants.

#include "lockstep/detail/bucket/step.hpp"
#include "lockstep/detail/comm/backend.hpp"
#include "lockstep/detail/comm/collective.hpp"
#include "lockstep/detail/hook/hook.hpp"
#include "lockstep/detail/model/model.hpp"
#include "lockstep/detail/observe/observers.hpp"
#include "lockstep/detail/optim/schedule.hpp"
#include "lockstep/detail/policy/pack.hpp"
#include "lockstep/detail/strategy/feature/join.hpp"
#include "lockstep/detail/strategy/policies.hpp"
#include "lockstep/detail/strategy/sharding/sharding.hpp"
#include "lockstep/detail/topology/groups.hpp"

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
  static constexpr bool is_fully = !alone && std::is_same_v<typename Given::choice, FullyShard>;
  /// Slices need more room where gradients are reduced in a smaller type than the parameters'.
  using precision = typename Pick<axes::Precision, Policies>::choice;
  static constexpr std::size_t room =
      element_size(precision::parameter_types::of(ElementKind::f32)) >
              sizeof(typename precision::template reduced<float>)
          ? 2 * shard_room
          : shard_room;
  template <class What>
  static constexpr bool is_zero_of = is_zero && std::is_same_v<typename Given::what, What>;

 public:
  /// May ranks exhaust their batches at different times? Join flags then follow the first bucket.
  static constexpr bool joins = !alone && Pick<axes::UnevenInputs, Policies>::joins;
  /// Do parameters lie in memory that ranks share? `ZeroRedundancy` of states is then `HostShared`:
  /// each rank keeps its slice's states, nothing is gathered. Hooks and joins need reduced buckets.
  static constexpr bool shares_parameters =
      !alone && (std::is_same_v<typename Given::choice, HostShared> ||
                 (in_common_memory && is_zero_of<States> && !joins &&
                  !Pick<axes::Hooks, Policies>::has_stages));
  /// Are buckets reduce-scattered and all-gathered in slices, one for each rank?
  static constexpr bool shards = (is_zero && !shares_parameters) || is_fully;
  /// Does a rank free the gradients that it does not own?
  static constexpr bool frees_gradients = is_zero_of<Gradients> || is_fully;
  /// Does a rank keep its slices of parameters, and gather buckets, its units, in a step?
  static constexpr bool gathers_parameters = is_fully;

  static constexpr std::size_t join_flags =
      joins ? join_flags_for(Pick<axes::World, Policies>::static_size) : 0;

  using units =
      std::conditional_t<is_fully, typename Given::template option<axes::ShardedUnits, Units<>>,
                         Units<>>;
  using plan_rules = PlanRules<Pick<axes::Buckets, Policies>, Pick<axes::Frozen, Policies>, units,
                               std::max(shards ? room : 0, align_up(join_flags * sizeof(double)))>;
};

template <class Model, class Policies>
struct ReplicaTraits : ShardingTraits<Policies> {
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
  using layout = Layout<Model, typename sharding::plan_rules, parameter_types>;
  using declared_layout = Layout<Model, typename sharding::plan_rules>;
  using buffer_layout = BufferLayout<Model, buffer_types>;
  using bare_step =
      BareStep<Model, typename sharding::plan_rules, memory, parameter_types, buffer_types>;
  using rule = choice<axes::Optimizer>;
  using curve = choice<axes::Schedule>;
  using groups = policy<axes::ParameterGroups>;
  using hooks = policy<axes::Hooks>;
  /// A phase of the step, for observers: an empty object where there are none.
  using span = typename policy<axes::Observers>::Span;

  using job_topology =
      typename policy<axes::Groups>::template in_world<policy<axes::World>::static_size>;
  static constexpr bool has_job_groups = !std::is_same_v<job_topology, NoGroups>;

  /// By parameter: 1 if a rank has used it since the last update, else 0.
  using Usage = SmallTable<std::uint8_t, layout::count>;

  /// Is the world size one at compile time?
  static constexpr bool alone = policy<axes::World>::static_size == 1;
  /// Are buckets divided inside of each group, with groups as replicas of each other?
  static constexpr bool shards_groups = sharding::shards && EvenTopology<job_topology>;
  /// Does a rank keep the states of its own elements only?
  static constexpr bool divides_states = sharding::shares_parameters || sharding::shards;
  /// The policy's answer, also in a world of one.
  static constexpr bool may_join = policy<axes::UnevenInputs>::joins;
  /// Are sums divided by the number of ranks that still have batches?
  static constexpr bool divides_by_live =
      sharding::joins && policy<axes::UnevenInputs>::divides_by_live;
  static constexpr std::size_t micro_batches = policy<axes::Accumulate>::micro_batches;
  static constexpr bool clips = policy<axes::Clip>::clips;
  static constexpr bool has_groups = groups::count > 1;
  static constexpr bool captures = policy<axes::StepExecution>::captures;
  static constexpr bool keeps_masters = precision::keeps_masters;
  static constexpr bool scales_loss = precision::scales_loss;
  static constexpr bool stops_at_anomaly = std::is_same_v<choice<axes::Anomaly>, Stop>;
  static constexpr bool skips_anomalies = std::is_same_v<choice<axes::Anomaly>, Skip>;
  static constexpr bool skips_unused = std::is_same_v<choice<axes::UnusedParameters>, Zero>;
  using subgraphs = SubgraphsIn<choice<axes::UnusedParameters>>;
  static constexpr bool has_subgraphs = subgraphs::count > 1;
  /// Is it tracked which parameters a rank has used since the last update?
  static constexpr bool notes_usage = skips_unused || has_subgraphs;
  /// Are parameters skipped whose averaged gradient is zero?
  static constexpr bool skips_zero_gradients = policy<axes::Hooks>::skips_zero_gradients;
  /// Can updates leave parameters out? Then each parameter counts its own updates.
  static constexpr bool counts_updates = notes_usage || skips_zero_gradients;
  /// Are gradients reduced by hooks, also in a world of one?
  static constexpr bool is_hooked = hooks::has_stages;
  /// Do ranks update with their own gradients and average parameters periodically (`LocalSGD`)?
  static constexpr bool averages_parameters = hooks::stages::averages_parameters;
  /// Are gradients reduce-scattered? Hooks reduce whole buckets, of which a rank uses its slice.
  static constexpr bool scatters_buckets = sharding::shards && !is_hooked;
  /// Does the program run forward and backward itself?
  static constexpr bool has_own_passes = requires { Model::has_own_passes; };
  static constexpr bool draws = Drawing<Model>;
  /// Are batch norm statistics taken over several ranks, and are these the group's?
  static constexpr bool syncs_norms = !alone && policy<axes::Norms>::is_synced;
  static constexpr bool syncs_norms_in_group = syncs_norms && policy<axes::Norms>::in_group;
  /// Does the step know the ranks of its norms, because these share statistics or may ask for them?
  static constexpr bool knows_norm_ranks = syncs_norms || (!alone && TensorListing<Model>);
  /// Are all buffers statistics over all ranks, and thus equal without communication?
  static constexpr bool buffers_agree = [] {
    if constexpr (syncs_norms && !syncs_norms_in_group && !TensorListing<Model>)
      return holds_only_norms<DeclaredList<Model, TensorRole::buffer>>();
    return false;
  }();
  static constexpr bool has_own_buffers = !alone && buffer_layout::count != 0 && !buffers_agree;
  static constexpr bool broadcasts_buffers =
      has_own_buffers && std::is_same_v<choice<axes::Buffers>, Broadcast>;
  /// Are buffers averaged before a model is evaluated or saved, and at the end of an epoch?
  static constexpr bool averages_buffers =
      has_own_buffers && std::is_same_v<choice<axes::Buffers>, Synced>;
  static constexpr bool unites_buffers = broadcasts_buffers || averages_buffers;

  /// Are arriving gradients tracked? One rank with one batch a step costs what the bare model does.
  static constexpr bool tracks =
      is_checked || !alone || micro_batches > 1 || notes_usage || is_hooked;

  static constexpr bool reduces = !alone || is_hooked;
  /// Does a bucket's reduction start with its last gradient, during backward? Where ranks share
  /// parameters, the updater reduces after backward, when no rank reads them any more.
  static constexpr bool reduces_early = reduces && !sharding::shares_parameters;

  /// Does every rank get a share of one batch (`DP`)?
  static constexpr bool scatters = !alone && std::is_same_v<choice<axes::ParallelStrategy>, DP>;
  /// Is one loss computed from all replicas' outputs, so that their gradients are summed?
  static constexpr bool takes_loss_of_outputs =
      OutputDeclaring<Model> && std::is_same_v<policy<axes::LossPlacement>, LossOnOutput>;
  /// Do all ranks know which sub-graph each of them uses? `DP` gives all replicas the same.
  static constexpr bool subgraphs_agree =
      has_subgraphs && (alone || scatters || subgraphs::same_on_all_ranks);
  /// Do ranks compare sub-graphs in the descriptions of their calls?
  static constexpr bool compares_subgraphs = subgraphs_agree && !alone && !scatters;

  static constexpr bool gathers_outputs = scatters && takes_loss_of_outputs;
  /// A replica's gradient is the mean over its share: weighted, because shares can differ in size.
  static constexpr bool weighs_shares = scatters && !gathers_outputs;

  /// The type in which gradients of T are reduced.
  template <class T>
  using reduce_type = std::conditional_t<alone, T, typename precision::template reduced<T>>;

  /// Slices begin at multiples of 16 bytes of the smaller type, so that those of both are aligned.
  template <class T>
  using sliced = std::conditional_t<(sizeof(reduce_type<T>) < sizeof(T)), reduce_type<T>, T>;

  static constexpr const auto& kinds() {
    return kinds_of<Model, TensorRole::parameter, parameter_types>;
  }

  /// Calls `f(std::type_identity<T>{})` with the element type of a kind.
  template <class F>
  static constexpr void with_element(ElementKind kind, F&& f) {
    lockstep::detail::with_element<Model, TensorRole::parameter, parameter_types>(
        kind, std::forward<F>(f));
  }
  /// Calls `f(std::type_identity<T>{})` for every element type of parameters.
  static constexpr void for_each_kind(const auto& f) {
    for (std::size_t k = 0; k != kinds().size; ++k) with_element(kinds().kinds[k], f);
  }
  /// Calls `f(std::type_identity<T>{}, piece)` for all buckets or runs, with elements of T.
  static constexpr void for_each_typed(const auto& pieces, const auto& f) {
    for (const auto& piece : pieces)
      with_element(piece.element, [&](auto type) { f(type, piece); });
  }
};

/// The job's call to which a step's collectives belong: a pass, where the program runs passes
/// itself, or where ranks compare sub-graphs the one that the replica has set for the thread.
template <class Traits, JobCall Pass = JobCall::step>
constexpr JobCall step_call() {
  if constexpr (Traits::compares_subgraphs) return job_call_of_thread();
  if constexpr (Traits::has_own_passes) return Pass;
  return JobCall::step;
}

template <class Traits>
struct TensorLayouts {
  explicit TensorLayouts(const typename Traits::model& model) : parameters(model), buffers(model) {}

  [[no_unique_address]] typename Traits::layout parameters;
  [[no_unique_address]] typename Traits::buffer_layout buffers;
};

}  // namespace lockstep::detail
