// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What the layers of a replica ask of each other, and of communicators on GPUs: executions,
/// sources of gradients, updaters, captures.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "lockstep/comm/communicator.hpp"

namespace lockstep::detail {

/// Memory, the step that a model sees, batches, losses, and passes over elements. An execution
/// knows nothing of buckets or optimizers. Specialised for every device: `Cpu` in
/// host_execution.hpp, `Cuda` in gpu_execution.cuh, which only nvcc can compile.
template <class Device, class Traits, class Comm>
class DeviceExecution;

/// A device's execution has
/// - `Arena`, which owns zeroed memory of the device, and `copy` and `zero` for it;
/// - `Step`, which a model's forward and backward are given, made by `step(layouts, arenas)`;
/// - `place(batch)`, the batch where the model can read it, until the next of its type is placed;
/// - `forward(model, step, batch)` and `loss(model, step, batch, outputs, gradients)`, which call
///   the model and give its `Loss`; a `Meter` adds up losses;
/// - the passes sum += more, values *= factor and to = from;
/// - `initialize(model, arenas, masters, write)`, which lets `write(parameters, buffers)` fill host
///   memory in the layouts that the model declares, and brings what it wrote into the arenas.
///
/// On a GPU all of it is enqueued in order; on the host it is done when the call returns.
template <class E>
concept Execution =
    std::convertible_to<typename E::Loss, double> && requires { typename E::Step; } &&
    requires(E& execution, const E& other, std::byte* data, std::size_t bytes, const int& batch,
             std::span<float> values, std::span<const float> more) {
      typename E::Arena;
      execution.copy(data, data, bytes);
      execution.zero(data, bytes);
      execution.place(batch);
      { execution.meter() } -> std::same_as<typename E::Meter>;
      execution.add(values, more);
      execution.scale(values, 0.5);
      execution.cast(values, values);
      { execution.is_far_from(other) } -> std::same_as<bool>;
    };

/// It can place rows [first, first + count) of a batch by themselves: `place(batch, first, count,
/// room)`, where `room` is the most that any rank has of the batch.
template <class E, class Batch>
concept RowPlacing =
    requires(E& execution, const Batch& batch, std::size_t n) { execution.place(batch, n, n, n); };

/// Its losses are made while the host goes on. `latest_loss` is that of the latest forward pass;
/// `average_loss(weight)` makes it the mean of all ranks' losses; `note_forward` counts a pass that
/// ran as part of a graph.
template <class E>
concept LossDeferring = Execution<E> && requires(E& execution) {
  { execution.latest_loss() } -> std::same_as<typename E::Loss>;
  execution.average_loss(0.5);
  execution.note_forward();
};

/// The gradients of a step on one rank. An updater takes what it needs: whole averages need not
/// exist, and never do where every rank reduces only the slice that it updates.
/// - `own<T>(offset, bytes)`: this rank's gradients in a piece of the arena, summed over
///   micro-batches. Where buckets are reduced early they are on their way and not to be touched.
/// - `wait(bucket)`: averages a bucket over ranks, or waits for its reduction that is under way.
///   **Ranks** all, in the order of buckets. `reduce()` does it for all buckets.
/// - `averages<T>(offset, bytes)`: a piece whose buckets are averaged, in the type it travelled in.
/// - `agree_on_usage()`: which parameters any rank has used since the last update. **Ranks** all.
template <class G>
concept GradientSource = requires(G& gradients, std::size_t n) {
  { gradients.template own<float>(n, n) } -> std::same_as<std::span<float>>;
  gradients.wait(n);
  gradients.reduce();
  { gradients.template averages<float>(n, n).size() } -> std::same_as<std::size_t>;
  { gradients.agree_on_usage() } -> std::same_as<const typename G::Usage&>;
};

/// A replica's optimizer: it keeps the states of what this rank updates, all parameters or a slice
/// of them, and its numbers (`options`, `schedule`). An update is `begin()`, which settles the
/// learning rate, and one of the two below, which leave new parameters on all ranks. **Ranks** all.
/// - `reduce_and_update(gradients)` from gradients that are each rank's own.
/// - `update_averaged(gradients)` after `gradients.reduce()`.
template <class U, class Gradients>
concept Updater = GradientSource<Gradients> && requires(U& updater, Gradients& gradients) {
  updater.options().lr;
  updater.schedule();
  { updater.learning_rate() } -> std::same_as<double>;
  { updater.steps() } -> std::same_as<std::uint64_t>;
  updater.set_epoch(std::uint64_t{1});
  updater.begin();
  updater.reduce_and_update(gradients);
  updater.update_averaged(gradients);
};

/// The updater of a device under a job's policies, as `type`. It is made from the communicator, the
/// execution, the layout of the parameters and the arena in which they lie. Specialised for every
/// device: `Cpu` in host_updater.hpp, `Cuda` in gpu_updater.cuh.
template <class Device, class Traits, class Comm>
struct UpdaterOn;

/// Its work is enqueued: `synchronize` blocks the host until this rank's stream is empty, and
/// throws what has gone wrong on it.
template <class C>
concept StreamCommunicator = Communicator<C> && requires(C& comm) { comm.synchronize(); };

/// `order_streams` makes every rank's stream wait for what all streams hold at the call. **Ranks**
/// all.
template <class C>
concept StreamOrdering = StreamCommunicator<C> && requires(C& comm) { comm.order_streams(); };

/// `capture(f)` runs `f` without running what it enqueues, and gives that as a graph, or as none
/// and the reason why; it does not throw. `replay` enqueues a graph. **Ranks** all, the same of
/// both.
template <class C>
concept CapturingCommunicator = StreamCommunicator<C> && requires(C& comm, void (*f)()) {
  { static_cast<bool>(comm.capture(f)) } -> std::same_as<bool>;
  { comm.capture(f).reason() } -> std::convertible_to<std::string>;
  comm.replay(comm.capture(f));
};

/// A graph is that of all ranks together: none may capture or replay unless all do.
template <class C>
concept JointlyCapturing = CapturingCommunicator<C> && C::captures_jointly;

}  // namespace lockstep::detail
