// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The concepts by which the layers of a replica know each other: executions, sources of
/// gradients, and communicators that capture.

#include "lockstep/comm/communicator.hpp"

namespace lockstep::detail {

/// How a replica works on a device: memory, the step that a model sees, batches, losses, and passes
/// over elements. It knows nothing of buckets or optimizers. Specialised for every device: `Cpu` in
/// host_execution.hpp, `Cuda` in gpu_execution.cuh, which only nvcc can compile.
template <class Device, class Traits, class Comm>
class DeviceExecution;

/// What a meter has added up: losses, each as often as its batch has samples, and those samples.
struct LossTotals {
  double sum = 0;
  double samples = 0;
};

/// A device's execution has
/// - `OnDevice`, which makes the device the calling thread's while it lives, also for the making
///   and the end of an object there (`leave`, `return_to`);
/// - `Arena`, which owns zeroed memory of the device, and `copy` and `zero` for it;
/// - `Step`, which a model's forward and backward are given, made by `step(layouts, arenas)`;
/// - `place(batch)`, which brings a batch to where the model reads it, until the next is placed;
/// - `forward(model, step, batch)` and `loss(model, step, batch, outputs, gradients)`, which call
///   the model and give its `Loss`; a `Meter` adds up losses;
/// - passes over elements: `add`, `scale` and `cast`;
/// - `initialize(model, arenas, masters, write)`, which lets `write(parameters, buffers)` write
///   values in the layouts that the model declares (see `ArenaValues`), and brings them into the
///   arenas.
///
/// On a GPU all of it is enqueued in order; on the host it is done when the call returns.
template <class E>
concept Execution =
    std::convertible_to<typename E::Loss, double> && requires { typename E::Step; } &&
    requires(E& execution, const E& other, std::byte* data, std::size_t bytes, const int& batch,
             std::span<float> values, std::span<const float> more) {
      typename E::Arena;
      typename E::OnDevice;
      execution.copy(data, data, bytes);
      execution.zero(data, bytes);
      execution.place(batch);
      { execution.meter() } -> std::same_as<typename E::Meter>;
      execution.add(values, more);
      execution.scale(values, 0.5);
      execution.cast(values, values);
      { execution.is_far_from(other) } -> std::same_as<bool>;
    };

/// An execution that can place rows [first, first + count) of a batch alone: `place(batch, first,
/// count, room)`, where `room` is the most rows that any rank has.
template <class E, class Batch>
concept RowPlacing =
    requires(E& execution, const Batch& batch, std::size_t n) { execution.place(batch, n, n, n); };

/// An execution that copies batches of this type where they lie on another device:
/// `bring_near(batch, Near<Batch>&)`.
template <class E, class Batch>
concept BringingNear = requires { requires E::template Near<Batch>::copies; };

/// An execution that computes losses while the host goes on. `latest_loss` is the loss of the
/// latest forward pass; `average_loss(weight)` makes it the mean over ranks; `note_forward` counts
/// a pass that ran as part of a graph.
template <class E>
concept LossDeferring = Execution<E> && requires(E& execution) {
  { execution.latest_loss() } -> std::same_as<typename E::Loss>;
  execution.average_loss(0.5);
  execution.note_forward();
};

/// A communicator whose work is enqueued on a stream: `synchronize` blocks the host until the
/// stream is empty, and throws the fault, if there is one.
template <class C>
concept StreamCommunicator = Communicator<C> && requires(C& comm) { comm.synchronize(); };

/// A communicator whose `order_streams` makes every rank's stream wait for the work that all
/// streams hold at the call. **Ranks** all.
template <class C>
concept StreamOrdering = StreamCommunicator<C> && requires(C& comm) { comm.order_streams(); };

/// A communicator that can capture a step. `capture(f)` calls `f` and returns the work that it
/// enqueues as a graph, or the reason why there is none; it does not throw. `replay` enqueues a
/// graph. **Ranks** all, with the graph of the same capture.
template <class C>
concept CapturingCommunicator = StreamCommunicator<C> && requires(C& comm, void (*f)()) {
  { static_cast<bool>(comm.capture(f)) } -> std::same_as<bool>;
  { comm.capture(f).reason() } -> std::convertible_to<std::string>;
  comm.replay(comm.capture(f));
};

/// A communicator whose graphs hold the work of all ranks, which capture and replay together.
template <class C>
concept JointlyCapturing = CapturingCommunicator<C> && C::captures_jointly;

/// A model whose libraries must know of a capture, because they give out memory or random numbers.
/// `model.guard_capture(stream, jointly)` makes a guard for one graph, which lives as long as the
/// graph. Its `begin()` is called before the capture, `end()` after it, and `before_replay()`
/// before each run of the graph, where `stream` is the compute stream's handle and `jointly` says
/// whether the graph holds the work of other ranks too. Before every micro-batch of a job that
/// captures, whether it is replayed or not, comes `model.prepare_step(step)`. **Host** none of them
/// waits for the GPU.
template <class Model, class Stream>
concept GuardingCaptures = requires(Model& model, Stream stream) {
  model.guard_capture(stream, true).begin();
  model.guard_capture(stream, true).end();
  model.guard_capture(stream, true).before_replay();
};

}  // namespace lockstep::detail
