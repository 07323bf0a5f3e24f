// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How the micro-batches of a replica are run: call by call, or as graphs.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "lockstep/core/typed_storage.hpp"
#include "lockstep/strategy/step_graphs.hpp"

namespace lockstep::detail {

/// `EagerStep`: call by call.
struct EagerSteps {
  template <class Replica, class Batch, class Enqueue>
  static auto run(Replica&, const Batch&, const Enqueue& enqueue, std::uint64_t = 0) {
    return enqueue();
  }
};

/// `CapturedStep`: as a graph, wherever there is one for the batch.
class CapturedSteps {
 public:
  /// `enqueue()` gives a micro-batch with this batch to the replica, whose update has begun if the
  /// micro-batch completes a step. `variant` tells apart batches that look alike to this rank and
  /// not to all. Returns the loss.
  template <class Replica, class Batch, class Enqueue>
  auto run(Replica& replica, const Batch& batch, const Enqueue& enqueue,
           std::uint64_t variant = 0) {
    const std::size_t before = replica.micro_batches();
    graphs_.get<StepGraphs<typename Replica::communicator_type, Batch>>().run(
        replica.communicator(), batch, {before != 0, replica.completes_step(), variant}, enqueue,
        [&] { replica.note_replay(); }, [&] { replica.undo_capture(before); });
    return replica.execution().latest_loss();
  }

  /// How many graphs there are for batches of this type.
  template <class Replica, class Batch>
  std::size_t graphs() {
    return graphs_.get<StepGraphs<typename Replica::communicator_type, Batch>>().size();
  }

 private:
  TypedStorage graphs_;
};

template <class Traits>
using StepRunner = std::conditional_t<Traits::captures, CapturedSteps, EagerSteps>;

/// One micro-batch of a replica that is led by nobody else. Returns its loss.
template <class Replica, class Runner, class Batch>
typename Replica::Loss run_step(Replica& replica, Runner& runner, const Batch& placed) {
  if (replica.completes_step()) replica.begin_update();
  return runner.run(replica, placed, [&] { return replica.run_micro_batch(placed); });
}

}  // namespace lockstep::detail
