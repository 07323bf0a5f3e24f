// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Runs the micro-batches of a replica eagerly, or as CUDA graphs.

#include "lockstep/detail/core/utility.hpp"
#include "lockstep/detail/strategy/concepts.hpp"

namespace lockstep::detail {

/// Equal for micro-batches that may share a graph, if their batches are equal, too.
struct GraphKind {
  bool adds;                ///< gradients are added to those of earlier micro-batches
  bool completes_step;      ///< reduction and update follow
  std::uint64_t variant;    ///< differs with sub-graphs, and with the shares of DP's replicas
  std::uint64_t phase = 0;  ///< differs where hooks do other work
  friend bool operator==(const GraphKind&, const GraphKind&) = default;
};

struct NoCaptureGuard {
  static constexpr void begin() {}
  static constexpr void end() {}
  static constexpr void before_replay() {}
};

/// For models whose libraries must know of a capture, because they allocate memory or draw random
/// numbers: `model.guard_capture(stream, jointly)` makes a graph's guard, `jointly` if it holds
/// other ranks' work. `begin()` and `end()` enclose the capture, `before_replay()` precedes replays
/// and `model.prepare_step(step)` every micro-batch. **Host** none waits for the GPU.
template <class Model, class Comm>
auto make_capture_guard([[maybe_unused]] Model& model, [[maybe_unused]] Comm& comm) {
  if constexpr (requires { model.guard_capture(comm.gpu().stream(), true); }) {
    return model.guard_capture(comm.gpu().stream(),
                               JointlyCapturing<Comm> && comm.world_size() != WorldSize{1});
  } else {
    return NoCaptureGuard{};
  }
}

/// A graph holds addresses and sizes: a batch with others needs its own. A batch runs eagerly once,
/// as libraries allocate at first use, then is captured. A failed capture ends capturing.
template <CapturingCommunicator Comm, class Batch, class Model>
class StepGraphs {
 public:
  using Guard = decltype(make_capture_guard(std::declval<Model&>(), std::declval<Comm&>()));

  /// Runs one micro-batch of `model`. `enqueue()` enqueues it; after a replay, `note()` makes the
  /// changes that `enqueue()` makes on the host; after a failed capture, `undo()` reverts them.
  void run(Comm& comm, Model& model, const Batch& batch, const GraphKind& kind, const auto& enqueue,
           const auto& note, const auto& undo) {
    if constexpr (!(std::equality_comparable<Batch> && std::copyable<Batch>)) {
      give_up(comm, "batches of this type cannot be compared: it needs operator==");
      enqueue();
    } else {
      const std::size_t found = find(batch, kind);
      const Way way = choose(found);
      if (!all_choose(comm, way, found) || way == Way::by_calls) {
        enqueue();
      } else if (way == Way::capture) {
        capture(comm, model, graphs_[found], enqueue, undo);
      } else {
        graphs_[found].guard->before_replay();
        comm.replay(*graphs_[found].graph);
        note();
      }
    }
  }

  std::size_t size() const {
    std::size_t captured = 0;
    for (const Entry& entry : graphs_) captured += entry.graph && *entry.graph;
    return captured;
  }

 private:
  using Graph = decltype(std::declval<Comm&>().capture(std::declval<void (*)()>()));
  enum class Way : std::uint8_t { by_calls, capture, replay };
  static constexpr std::size_t most = 64;

  struct Entry {
    Batch batch;
    GraphKind kind;
    std::uint64_t met = 0;
    std::optional<Guard> guard;  // outlives the graph
    std::optional<Graph> graph;
  };

  std::size_t find(const Batch& batch, const GraphKind& kind) {
    std::size_t i = 0;
    while (i != graphs_.size() && !(graphs_[i].batch == batch && graphs_[i].kind == kind)) ++i;
    if (i == graphs_.size() && i != most) add(batch, kind);
    return i;
  }

  // Work that is done once for each batch stays out of the functions of every step.

  [[gnu::noinline]] void add(const Batch& batch, const GraphKind& kind) {
    graphs_.push_back(Entry{batch, kind, 0, {}, {}});
  }

  /// Captures and runs a micro-batch, or runs it eagerly if it cannot be captured.
  [[gnu::noinline]] void capture(Comm& comm, Model& model, Entry& entry, const auto& enqueue,
                                 const auto& undo) {
    entry.guard.emplace(make_capture_guard(model, comm));
    entry.guard->begin();
    entry.graph.emplace(comm.capture(enqueue));
    entry.guard->end();
    if (*entry.graph) {
      entry.guard->before_replay();
      return comm.replay(*entry.graph);
    }
    entry.guard.reset();
    give_up(comm, entry.graph->reason());
    undo();
    enqueue();
  }

  Way choose(std::size_t found) {
    if (gave_up_ || found == most || graphs_[found].met++ == 0) return Way::by_calls;
    return graphs_[found].graph ? Way::replay : Way::capture;
  }

  /// Do all ranks choose the same? Ranks that capture jointly must.
  bool all_choose(Comm& comm, Way way, std::size_t found) const {
    if constexpr (JointlyCapturing<Comm>) {
      const std::uint64_t mine[] = {found * 4 + static_cast<std::uint64_t>(way)};
      std::vector<std::uint64_t> all(comm.world_size().value());
      comm.all_gather(mine, all);
      return std::ranges::count(all, mine[0]) == std::ssize(all);
    }
    return true;
  }

  void give_up(Comm& comm, const std::string& reason) {
    if (!gave_up_ && comm.rank() == Rank{0}) {
      // The lines after the first are a library's stack trace.
      const std::string line = reason.substr(0, reason.find('\n'));
      std::fputs(("lockstep: CapturedStep runs call by call: " + line + "\n").c_str(), stderr);
    }
    gave_up_ = true;
  }

  std::vector<Entry> graphs_;
  bool gave_up_ = false;
};

class CapturedSteps {
 public:
  /// Runs a micro-batch by `enqueue()`, after `begin_update` if a step's last. Returns the loss.
  template <class Replica, class Batch, class Enqueue>
  auto run(Replica& replica, const Batch& batch, const Enqueue& enqueue, std::uint64_t variant) {
    if constexpr (!std::is_same_v<typename Graphs<Replica, Batch>::Guard, NoCaptureGuard>)
      replica.with_step([&](auto& step) { replica.model().prepare_step(step); });
    replica.before_capture();
    const std::uint64_t phase = replica.begin_graph();
    graphs_.get<Graphs<Replica, Batch>>().run(
        replica.communicator(), replica.model(), batch,
        {replica.micro_batches() != 0, replica.completes_step(), variant, phase}, enqueue,
        [&] { replica.note_replay(); }, [&] { replica.undo_capture(); });
    return replica.execution().latest_loss();
  }

  /// The number of graphs for batches of this type.
  template <class Replica, class Batch>
  std::size_t graphs() {
    return graphs_.get<Graphs<Replica, Batch>>().size();
  }

 private:
  template <class Replica, class Batch>
  using Graphs = StepGraphs<typename Replica::communicator_type, Batch,
                            std::remove_cvref_t<decltype(std::declval<Replica&>().model())>>;

  TypedStorage graphs_;
};

/// Eager steps need no state.
template <class Traits>
using StepRunner = std::conditional_t<Traits::captures, CapturedSteps, std::type_identity<void>>;

}  // namespace lockstep::detail
