// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The members that every job has, listed once: a trainer, `DistributedDataParallel`,
/// `DataParallel` and what stands for a rejected one show those of their first replica.

#include "lockstep/bucket/subgraphs.hpp"
#include "lockstep/checkpoint/state.hpp"
#include "lockstep/optim/progress.hpp"
#include "lockstep/strategy/feature/unused_parameters.hpp"

namespace lockstep::detail {

/// A base of `Self`, whose `first()` is the replica of this rank, replica 0 of
/// `ParallelStrategy<DP>`, or the wrapper of a trainer. None of these members communicates, but
/// those that run one of the job's `Subgraphs`.
template <class Self>
class JobMembers {
 public:
  /// The model. Members that a program changes must be changed on all ranks, and with
  /// `ParallelStrategy<DP>` in all replicas (`for_each_model`).
  auto& model() { return self().first().model(); }
  const auto& model() const { return self().first().model(); }

  /// The options of optimizer and schedule: `job.optimizer().lr = 0.01`. They must be the same on
  /// all ranks, which a trainer checks at the begin of every epoch; replicas follow the first.
  auto& optimizer() { return self().first().optimizer(); }
  /// Those of one of `ParameterGroups`: `job.optimizer(NoDecay<>{}).lr = 0.02`. The first call
  /// copies those of `optimizer()`, so set what they have in common before.
  template <class Set>
  auto& optimizer(Set set) {
    return self().first().optimizer(set);
  }
  auto& group_options() { return self().first().group_options(); }
  auto& schedule() { return self().first().schedule(); }
  double learning_rate() const { return self().first().learning_rate(); }
  /// How many updates the optimizer has made; and how many `Anomaly<Skip>` has left out, for which
  /// the **Host** blocks until all steps are done.
  std::uint64_t updates() const { return self().first().updates(); }
  std::uint64_t skipped_steps() const { return self().first().skipped_steps(); }
  /// How many micro-batches are added up.
  auto micro_batches() const { return self().first().micro_batches(); }

  /// A parameter, a gradient or a buffer, to look at. Gradients are averages after `reduce`, else
  /// this rank's own; with `ParallelStrategy<DP>` those of the first replica's share.
  auto param(auto key) const { return self().first().param(key); }
  auto grad(auto key) const { return self().first().grad(key); }
  auto buffer(auto key) const { return self().first().buffer(key); }

  /// Calls `f(name, view)` for every parameter, in the order of declaration, with the view that
  /// `param` gives, and likewise for gradients and buffers. On a GPU the host waits for it first.
  template <class F>
  void for_each_parameter(F&& f) const {
    self().first().for_each_parameter(f);
  }
  template <class F>
  void for_each_gradient(F&& f) const {
    self().first().for_each_gradient(f);
  }
  template <class F>
  void for_each_buffer(F&& f) const {
    self().first().for_each_buffer(f);
  }
  /// Calls `f(parameter, state, view)` for every state of the optimizer that this rank keeps: see
  /// `Replica::for_each_state`.
  template <class F>
  void for_each_state(F&& f) const {
    self().first().for_each_state(f);
  }

  /// A sub-graph by a name that is known at run time; another name is an error.
  static SubgraphChoice subgraph(std::string_view name) {
    return find_subgraph<typename Self::subgraphs>(name);
  }
  /// A step of the whole model: `self().step(choice, batch)` says what it does.
  template <class Batch>
  auto step(const Batch& batch) {
    return self().step(SubgraphChoice{}, batch);
  }
  /// A step, an evaluation or a prediction with one of the job's `Subgraphs`:
  /// `job.step<"with_adapter"_s>(batch)`, or with a choice at run time,
  /// `job.step(job.subgraph("with_adapter"), batch)`. Micro-batches of one step may use different
  /// ones. **Ranks** and **Host** as without a sub-graph; evaluations use one set on all ranks.
  template <auto Set, class Batch>
  auto step(const Batch& batch) {
    return self().step(Set, batch);
  }
  template <auto Set, class... Arguments>
  auto evaluate(Arguments&&... arguments) {
    const EvaluatedSubgraph<Self> in(self(), Set);
    return self().evaluate(std::forward<Arguments>(arguments)...);
  }
  template <auto Set, class... Arguments>
  auto predict(Arguments&&... arguments) {
    const EvaluatedSubgraph<Self> in(self(), Set);
    return self().predict(std::forward<Arguments>(arguments)...);
  }
  /// Evaluations and predictions use a sub-graph, by its number, from now on.
  void evaluate_subgraph(std::size_t set) { self().first().evaluate_subgraph(set); }

  /// Adds up the losses of many steps.
  auto loss_meter() { return self().first().loss_meter(); }
  /// Copies predicted outputs into the host's memory. **Host** blocks.
  template <class Rows>
  void copy_outputs(const Rows& rows, void* to) {
    self().first().copy_outputs(rows, to);
  }

  /// The bytes that this rank keeps of the optimizer's states and of gradients.
  auto state_bytes() const { return self().first().state_bytes(); }
  auto gradient_bytes() const { return self().first().gradient_bytes(); }

  // For checkpoints: see `Replica`.

  void list_state(StateUse use, std::vector<StateEntry>& to) { self().first().list_state(use, to); }
  JobShape job_shape() const { return self().first().job_shape(); }
  auto progress() const { return self().first().progress(); }
  void set_progress(const ReplicaProgress& progress) { self().first().set_progress(progress); }
  void copy_out(std::span<const StateCopy> copies) { self().first().copy_out(copies); }
  void await_copies() { self().first().await_copies(); }
  void copy_in(const StateEntry& piece, const std::byte* from) {
    self().first().copy_in(piece, from);
  }
  auto make_kept_memory(std::size_t bytes) const { return self().first().make_kept_memory(bytes); }

  /// The calling thread works on this rank's GPU while the result lives, whatever its current one
  /// is: for kernels of the program's own. The members of a job do so by themselves.
  [[nodiscard]] auto on_device() const { return self().first().on_device(); }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }
};

}  // namespace lockstep::detail
