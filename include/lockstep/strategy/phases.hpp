// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The phases of a hand-written training step, as types: each has only what may come next. An
/// exception in one aborts the calls of all ranks.

#include <cstddef>
#include <exception>
#include <type_traits>

#include "lockstep/bucket/subgraphs.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/strategy/replica.hpp"
#include "lockstep/strategy/scatter.hpp"

namespace lockstep::detail {

/// Tells all ranks of the exception that is being handled, and throws it on.
template <class Comm>
[[noreturn, gnu::noinline]] void tell_and_rethrow(Comm& comm) {
  try {
    throw;
  } catch (const Error& error) {
    const Error named = error.rank() ? error : error.on(comm.rank());
    comm.abandon(named.what());
    throw named;
  } catch (const std::exception& error) {
    comm.abandon(error.what());
    throw;
  } catch (...) {
    comm.abandon("an exception that is no std::exception");
    throw;
  }
}

/// Calls `f()`. Where it throws, every other rank's call fails with the same words, and the job is
/// over. A world that the compiler knows to be of one (`Alone`) has nobody to tell.
template <bool Alone, class Comm, class F>
auto tell_others_of(Comm& comm, const F& f) -> decltype(f()) {
  if constexpr (Alone) {
    return f();
  } else {
    try {
      return f();
    } catch (...) {
      tell_and_rethrow(comm);
    }
  }
}

/// Calls `f()`, and tells the other ranks of a replica's communicator if it throws, also those that
/// are in a call of the job's groups.
template <class Replica, class F>
auto tell_others(Replica& replica, const F& f) -> decltype(f()) {
  if constexpr (Replica::traits::has_job_groups) {
    return tell_others_of<Replica::traits::alone>(replica.groups(), f);
  } else {
    return tell_others_of<Replica::traits::alone>(replica.communicator(), f);
  }
}

/// Calls of phases out of order, each with a compile error in words. A phase replaces the member
/// that may come next, but only for temporaries: an object with a name could be used twice.
template <class Phase>
class OutOfOrder {
 public:
  template <class P = Phase>
  void backward() const& {
    refuse<P>();
  }
  template <class P = Phase>
  void reduce() const& {
    refuse<P>();
  }
  template <class P = Phase>
  void update() const& {
    refuse<P>();
  }
  template <class P = Phase>
  void reduce_and_update() const& {
    refuse<P>();
  }

 private:
  template <class P>
  static void refuse() {
    static_assert(sizeof(P) == 0,
                  "lockstep: the phases of a step come in the order ddp.forward(batch)"
                  ".backward().reduce().update(), each once; use std::move for a phase that has "
                  "a name, and write reduce_and_update() to fuse the last two");
  }
};

/// The base of every phase: the replica, and the loss of its batch.
template <class Replica, class Self>
class PhaseOf : public OutOfOrder<Self> {
 public:
  PhaseOf(Replica& replica, typename Replica::Loss loss) : replica_(replica), loss_(loss) {}
  PhaseOf(const PhaseOf&) = delete;
  PhaseOf& operator=(const PhaseOf&) = delete;

  /// The loss of this rank's batch.
  auto loss() const { return loss_; }

 protected:
  /// Calls `f(replica)`, and tells all ranks if it fails.
  template <class F>
  void run(const F& f) {
    [[maybe_unused]] const auto on = replica_.on_device();
    tell_others(replica_, [&] { f(replica_); });
  }

  Replica& replica() const { return replica_; }

 private:
  Replica& replica_;
  typename Replica::Loss loss_;
};

/// After reduce: gradients are averages, the same on all ranks, and can be looked at.
template <class Replica>
class [[nodiscard("update comes next")]] Averaged : public PhaseOf<Replica, Averaged<Replica>> {
 public:
  using PhaseOf<Replica, Averaged>::PhaseOf;
  using OutOfOrder<Averaged>::update;

  auto grad(auto key) const { return this->replica().grad(key); }
  /// Calls `f(name, view)` for every averaged gradient.
  template <class F>
  void for_each_gradient(F&& f) const {
    this->replica().for_each_gradient(f);
  }

  /// The optimizer's step. Returns the loss. **Ranks** all. **Host** blocks until the parameters
  /// are new on all ranks.
  auto update() && {
    this->run([](Replica& replica) { replica.update(); });
    return this->loss();
  }
};

/// After backward: gradients are this rank's own, and reductions of some buckets are under way.
template <class Replica>
class [[nodiscard("reduce or reduce_and_update comes next")]] Backwarded
    : public PhaseOf<Replica, Backwarded<Replica>> {
 public:
  using PhaseOf<Replica, Backwarded>::PhaseOf;
  using OutOfOrder<Backwarded>::reduce;
  using OutOfOrder<Backwarded>::reduce_and_update;

  /// Gradients = their average over ranks. **Ranks** all. **Host** blocks.
  Averaged<Replica> reduce() && {
    this->run([](Replica& replica) { replica.reduce(); });
    return Averaged<Replica>(this->replica(), this->loss());
  }

  /// Reduces and updates in one pass over memory where possible; gradients are not averaged in
  /// place. Returns the loss. **Ranks** all. **Host** blocks.
  auto reduce_and_update() && {
    this->run([](Replica& replica) {
      replica.begin_update();
      replica.reduce_and_update();
    });
    return this->loss();
  }
};

/// After forward. In a `no_sync` scope, backward adds to the gradients, and nothing follows.
template <class Replica, class Batch, Sync S>
class [[nodiscard("backward comes next")]] Forwarded
    : public PhaseOf<Replica, Forwarded<Replica, Batch, S>> {
 public:
  using OutOfOrder<Forwarded>::backward;

  /// `rows` are the samples of the batch, where outputs are kept.
  Forwarded(Replica& replica, const Batch& placed, typename Replica::Loss loss, std::size_t rows)
      : PhaseOf<Replica, Forwarded>(replica, loss), placed_(placed), rows_(rows) {}

  /// The model's outputs of this rank's batch, a row for each sample, of which the loss was taken.
  /// They are valid until the next forward pass. **Host** on a GPU, blocks until they are there.
  template <class R = Replica>
  auto outputs() const {
    static_assert(R::template keeps_outputs<Batch>(),
                  "lockstep: this model's forward keeps no outputs; give it using Output = "
                  "OutputOf<float, 10> and its parts predict, loss and backward, and leave "
                  "LossOnReplica out");
    if constexpr (R::template keeps_outputs<Batch>()) return this->replica().outputs(rows_);
  }

  /// Runs the model's backward. In a `no_sync` scope it returns the loss. **Ranks** all; in such a
  /// scope this one. **Host** runs the model; buckets start to travel as they are complete.
  auto backward() && {
    this->run([&](Replica& replica) {
      if constexpr (Replica::template keeps_outputs<Batch>()) {
        replica.backward(placed_, S, replica.output_gradients(rows_));
      } else {
        replica.backward(placed_, S);
      }
    });
    if constexpr (S == Sync::yes) {
      return Backwarded<Replica>(this->replica(), this->loss());
    } else {
      return this->loss();
    }
  }

 private:
  const Batch& placed_;
  std::size_t rows_;
};

/// Runs a batch's forward pass, and tells all ranks if it fails. A model that declares outputs runs
/// in two parts, so that they can be looked at.
template <Sync S, class Replica, class Batch>
auto forward_phase(Replica& replica, const Batch& batch, std::size_t subgraph = whole_model) {
  [[maybe_unused]] const auto on = replica.on_device();
  const auto& placed = replica.place(batch);
  using Placed = std::remove_cvref_t<decltype(placed)>;
  std::size_t rows = 0;
  if constexpr (Replica::template keeps_outputs<Placed>()) rows = row_count(batch);
  const auto forward = [&] {
    replica.choose_subgraph(subgraph);
    replica.draw_anew();
    if constexpr (Replica::template keeps_outputs<Placed>()) {
      return replica.forward_with_outputs(placed, rows, S);
    } else {
      return replica.forward(placed, S);
    }
  };
  return Forwarded<Replica, Placed, S>(replica, placed, tell_others(replica, forward), rows);
}

/// The result of `no_sync`: it adds up gradients without communication.
template <class Replica>
class LocalScope {
 public:
  explicit LocalScope(Replica& replica) : replica_(replica) {}

  template <class Batch>
  auto forward(const Batch& batch) {
    return forward_phase<Sync::no>(replica_, batch);
  }
  template <class Batch>
  void forward(const Batch&& batch) = delete;  // backward needs it again

  /// With a sub-graph, by its key or as a choice.
  template <auto Set, class Batch>
  auto forward(const Batch& batch) {
    return forward(Set, batch);
  }
  template <class Set, class Batch>
  auto forward(const Set& set, const Batch& batch) {
    return forward_phase<Sync::no>(replica_, batch,
                                   subgraph_number<typename Replica::subgraphs>(set));
  }

 private:
  Replica& replica_;
};

}  // namespace lockstep::detail
