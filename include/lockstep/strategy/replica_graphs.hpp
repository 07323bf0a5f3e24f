// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of a replica whose micro-batches run as graphs (`StepGraphs`).

#include <cstdint>
#include <type_traits>
#include <utility>

namespace lockstep::detail {

/// A base of `Self`, the replica of `Traits`.
template <class Self, class Traits>
class ReplicaGraphs {
 public:
  /// A micro-batch has run as a graph, without a call of this replica.
  void note_replay() {
    if constexpr (counts_hooks) {
      if (self().completes_step()) self().gradients_.hooked_reductions().note_replay();
    }
    if constexpr (Traits::has_subgraphs) {
      if (self().completes_step()) self().gradients_.forget_usage();
    }
    self().micro_batches_ = self().completes_step() ? 0 : self().micro_batches_ + 1;
    self().execution_.note_forward();
  }
  /// What a micro-batch that is captured may change on the host.
  auto before_capture() const {
    if constexpr (Traits::has_subgraphs) {
      return std::pair(self().micro_batches_, self().gradients_.kept_usage());
    } else {
      return std::pair(self().micro_batches_, 0);
    }
  }
  /// A micro-batch was to be captured and could not be: nothing of it has run, and all is as it was
  /// `before`.
  void undo_capture(const auto& before) {
    self().gradients_.forget_reductions();
    if constexpr (counts_hooks)
      self().gradients_.hooked_reductions().go_back(before_.steps, before_.bytes);
    if constexpr (Traits::shards) self().updater_.gathers().forget();
    self().micro_batches_ = before.first;
    if constexpr (Traits::has_subgraphs) self().gradients_.set_usage(before.second);
  }
  /// Before the update of a captured micro-batch begins: its sub-graph is known to be used.
  void note_subgraph() {
    if constexpr (Traits::has_subgraphs) self().gradients_.note_subgraph();
  }
  /// A number that differs where the work of a micro-batch does, because it or one before it uses
  /// another sub-graph.
  std::uint64_t graph_variant() const {
    if constexpr (Traits::has_subgraphs) {
      return self().gradients_.subgraphs().variant();
    } else {
      return 0;
    }
  }
  /// Where micro-batches run as graphs: the next one may be captured. Micro-batches that share a
  /// graph have equal results.
  std::uint64_t begin_graph() {
    if constexpr (counts_hooks) {
      auto& reductions = self().gradients_.hooked_reductions();
      reductions.note_step(before_.steps, before_.bytes);
      before_ = {reductions.steps(), reductions.bytes_sent()};
      if (!self().completes_step()) return 0;
      reductions.tell_step();
      return reductions.phase();
    }
    return 0;
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }

  static constexpr bool counts_hooks = Traits::is_hooked && Traits::captures;

  struct HookCounts {
    std::uint64_t steps = 0;
    std::uint64_t bytes = 0;
  };
  struct NoCounts {};
  // Before the latest micro-batch.
  [[no_unique_address]] std::conditional_t<counts_hooks, HookCounts, NoCounts> before_;
};

}  // namespace lockstep::detail
