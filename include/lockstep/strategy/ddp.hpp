// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `ParallelStrategy<DDP>`: a model wrapped so that ranks train it together.

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "lockstep/core/strong.hpp"
#include "lockstep/strategy/phases.hpp"
#include "lockstep/strategy/replica.hpp"
#include "lockstep/strategy/replica_access.hpp"
#include "lockstep/strategy/step_runner.hpp"
#include "lockstep/strategy/tell_others.hpp"

namespace lockstep {

/// The replica of this rank. What goes wrong on a rank is said to all others before it is thrown,
/// so that every rank ends with the words of the first failure.
template <class Model, class Policies, class Comm>
class BasicDdp : public detail::ReplicaAccess<BasicDdp<Model, Policies, Comm>>,
                 public detail::OutOfOrder<BasicDdp<Model, Policies, Comm>> {
  using ThisReplica = Replica<Model, Policies, Comm>;
  using traits = typename ThisReplica::traits;

 public:
  using model_type = Model;
  using bare_step = typename ThisReplica::bare_step;
  using step_type = typename ThisReplica::step_type;
  using Loss = typename ThisReplica::Loss;

  /// Compares the job over ranks, then gives all of them rank 0's initial values. **Ranks** all.
  /// **Host** blocks.
  explicit BasicDdp(Comm& comm, Model model = {}, Seed seed = {})
      : replica_(comm,
                 detail::tell_others_of<traits::alone>(
                     comm, [&] { return typename ThisReplica::layouts_type(model); }),
                 std::move(model)) {
    tell([&] { replica_.initialize_from_model(seed); });
  }

  ThisReplica& replica() { return replica_; }
  const ThisReplica& replica() const { return replica_; }

  void set_epoch(std::uint64_t epoch) { replica_.set_epoch(epoch); }

  /// Writes parameters and buffers anew: `f(initial)` on rank 0, whose values all ranks get.
  /// **Ranks** all. **Host** blocks.
  template <class F>
  void initialize(F&& f, Seed seed = {}) {
    tell([&] { replica_.initialize(f, seed); });
  }

  /// Rank 0's buffers, on all ranks. **Ranks** all. **Host** blocks.
  void synchronize_buffers() { replica_.synchronize_buffers(); }

  /// One micro-batch: forward, backward and, with the last of `Accumulate<N>`, reduce and update.
  /// Batches of `no_sync` count among the N. Returns the loss of this rank's batch. **Ranks** all.
  /// **Host** blocks, or on a GPU enqueues. **Stream** the step's own.
  template <class Batch>
  Loss step(const Batch& batch) {
    const auto& placed = replica_.place(batch);
    return tell([&] { return detail::run_step(replica_, runner_, placed); });
  }

  /// A hand-written loop: `ddp.forward(batch).backward().reduce().update()`. Each phase is a type
  /// that has only the next one as a member; another order does not compile. **Ranks** all.
  /// **Host** blocks.
  template <class Batch>
  auto forward(const Batch& batch) {
    return detail::forward_phase<detail::Sync::yes>(replica_, batch);
  }
  template <class Batch>
  void forward(const Batch&& batch) = delete;  // backward needs it again

  /// Batches whose gradients are only added up, on this rank alone, to travel with the next that is
  /// reduced: `ddp.no_sync().forward(batch).backward()`. As in PyTorch, the sum is not divided.
  auto no_sync() {
    static_assert(traits::tracks,
                  "lockstep: with World<1> and Accumulate<1> a step is the bare model and cannot "
                  "add up gradients; add Accumulate<N>, or use World<dynamic>");
    return detail::LocalScope<ThisReplica>(replica_);
  }

  /// The loss of a batch, with nothing kept for backward and no communication.
  template <class Batch>
  Loss evaluate(const Batch& batch) {
    return replica_.evaluate(replica_.place(batch));
  }
  /// The model's own evaluation: `model.evaluate(step, batch, tally)`, or its mean loss.
  template <class Batch, class Tally>
  void evaluate(const Batch& batch, Tally& tally) {
    replica_.evaluate(replica_.place(batch), tally, [&] { return batch.size(); });
  }

  /// How many graphs `CapturedStep` has made for batches of this type.
  template <class Batch>
  std::size_t captured_graphs()
    requires(traits::captures)
  {
    using Placed = std::remove_cvref_t<decltype(replica_.place(std::declval<const Batch&>()))>;
    return runner_.template graphs<ThisReplica, Placed>();
  }

 private:
  template <class F>
  auto tell(const F& f) -> decltype(f()) {
    return detail::tell_others(replica_, f);
  }

  ThisReplica replica_;
  [[no_unique_address]] detail::StepRunner<traits> runner_;
};

}  // namespace lockstep
