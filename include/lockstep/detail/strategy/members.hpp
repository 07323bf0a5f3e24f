// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The members that `Trainer`, `DistributedDataParallel` and `DataParallel` have in common.

#include "lockstep/detail/checkpoint/state.hpp"
#include "lockstep/detail/strategy/feature/unused_parameters.hpp"

namespace lockstep::detail {

/// A CRTP base. `Self::first()` is this rank's replica, replica 0 of DP, or a trainer's wrapper.
/// Only members that run one of the job's `Subgraphs` communicate.
template <class Self>
class JobMembers {
 public:
  /// Changes to the model must be made on all ranks, with DP in all replicas (`for_each_model`).
  auto& model() { return self().first().model(); }
  const auto& model() const { return self().first().model(); }

  /// `job.optimizer().lr = 0.01`, on all ranks, which trainers check. DP's replicas follow.
  auto& optimizer() { return self().first().optimizer(); }
  /// `job.optimizer(NoDecay<>{}).lr = 0.02`: a group's first call copies `optimizer()`'s options.
  auto& optimizer(auto set) { return self().first().optimizer(set); }
  auto& group_options() { return self().first().group_options(); }
  auto& schedule() { return self().first().schedule(); }
  double learning_rate() const { return self().first().learning_rate(); }
  /// The updates made, and those that `Anomaly<Skip>` skipped, for which the **Host** blocks.
  std::uint64_t updates() const { return self().first().updates(); }
  std::uint64_t skipped_steps() const { return self().first().skipped_steps(); }
  /// The number of accumulated micro-batches.
  auto micro_batches() const { return self().first().micro_batches(); }

  /// Gradients are averages after `reduce`, else this rank's own; with DP the first replica's.
  auto param(auto key) const { return self().first().param(key); }
  auto grad(auto key) const { return self().first().grad(key); }
  auto buffer(auto key) const { return self().first().buffer(key); }

  /// Calls `f(name, view)` in the order of declaration, with the view that `param`, `grad` or
  /// `buffer` returns. **Host** on a GPU, blocks until the GPU is idle.
  void for_each_parameter(auto&& f) const { self().first().for_each_parameter(f); }
  void for_each_gradient(auto&& f) const { self().first().for_each_gradient(f); }
  void for_each_buffer(auto&& f) const { self().first().for_each_buffer(f); }
  /// Calls `f(parameter, state, view)`: see `Replica::for_each_state`.
  void for_each_state(auto&& f) const { self().first().for_each_state(f); }

  /// A sub-graph by a name that is known at run time. Throws for an unknown name.
  static SubgraphChoice subgraph(std::string_view name) {
    return find_subgraph<typename Self::subgraphs>(name);
  }
  /// A step of the whole model: see `self().step(choice, batch)`.
  auto step(const auto& batch) { return self().step(SubgraphChoice{}, batch); }
  /// `job.step<"a"_s>(batch)` or `job.step(job.subgraph("a"), batch)`: with one of `Subgraphs`, in
  /// an evaluation the same on all ranks. **Ranks** and **Host** as without a sub-graph.
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
  /// Sets the sub-graph, by its number, of all following evaluations and predictions.
  void evaluate_subgraph(std::size_t set) { self().first().evaluate_subgraph(set); }

  /// Accumulates the losses of many steps.
  auto loss_meter() { return self().first().loss_meter(); }
  /// Copies predicted outputs into host memory. **Host** blocks.
  void copy_outputs(const auto& rows, void* to) { self().first().copy_outputs(rows, to); }

  /// This rank's bytes of parameters, of optimizer states with master weights, and of gradients
  /// with what they are reduced in.
  auto parameter_bytes() const { return self().first().parameter_bytes(); }
  auto state_bytes() const { return self().first().state_bytes(); }
  auto gradient_bytes() const { return self().first().gradient_bytes(); }

  // For checkpoints: see `Replica`.

  void release_units() { self().first().release_units(); }

  void list_state(StateUse use, std::vector<StateEntry>& to) { self().first().list_state(use, to); }
  JobShape job_shape() const { return self().first().job_shape(); }
  auto progress() const { return self().first().progress(); }
  void set_progress(const ReplicaProgress& progress) { self().first().set_progress(progress); }
  void copy_out(std::span<const StateCopy> copies) { self().first().copy_out(copies); }
  void await_copies() { self().first().await_copies(); }
  void copy_in(const StateEntry& piece, const std::byte* from) {
    self().first().copy_in(piece, from);
  }
  auto make_state_memory(std::size_t bytes) const {
    return self().first().make_state_memory(bytes);
  }

  /// RAII: selects this rank's GPU on the calling thread, for the program's own kernels.
  [[nodiscard]] auto on_device() const { return self().first().on_device(); }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }
};

}  // namespace lockstep::detail
