// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The concepts of a replica's layers: executions, and communicators that use streams.

#include "lockstep/detail/comm/communicator.hpp"

namespace lockstep::detail {

/// A replica's work on a device (see `Execution`), for `Cpu` and, where nvcc compiles, `Cuda`.
template <class Device, class Traits, class Comm>
class DeviceExecution;

/// Losses, each weighted by its batch's samples, and the number of these samples.
struct LossTotals {
  double sum = 0;
  double samples = 0;
};

/// A device's execution has
/// - `OnDevice`, which makes the device the thread's current one while it lives, or for an object's
///   construction (`leave`) and destruction (`return_to`);
/// - `Arena`, which owns zeroed device memory, and `copy` and `zero` for it;
/// - `step(layouts, arenas)`, which makes the `Step` for a model's forward and backward;
/// - `to_device(batch)`, which brings a batch to where the model reads it, until the next one;
/// - `forward(model, step, batch)` and `loss(model, step, batch, outputs, gradients)`, which call
///   the model and give its `Loss`; a `Meter` adds up losses;
/// - `to_device(batch, first, count, room)`, if it can bring rows [first, first + count) alone,
///   where `room` is the most rows of any rank, and `bring_near(batch, near)`, if it copies batches
///   from other devices;
/// - where losses are computed asynchronously, `latest_loss` of the latest forward pass,
///   `average_loss(weight)` over ranks, and `note_forward`, which counts a replayed pass;
/// - passes over elements: `add`, `scale` and `cast`;
/// - `initialize(model, arenas, masters, write)`: `write(parameters, buffers)` writes values in the
///   model's declared layouts (see `ArenaValues`), which are copied to the arenas.
///
/// On a GPU everything is enqueued in order; on the host it is done when the call returns.
template <class E>
concept Execution =
    std::convertible_to<typename E::Loss, double> && requires { typename E::Step; } &&
    requires(E& execution, const E& other, std::byte* data, std::size_t bytes, const int& batch,
             std::span<float> values, std::span<const float> more) {
      typename E::Arena;
      typename E::OnDevice;
      execution.copy(data, data, bytes);
      execution.zero(data, bytes);
      execution.to_device(batch);
      { execution.meter() } -> std::same_as<typename E::Meter>;
      execution.add(values, more);
      execution.scale(values, 0.5);
      execution.cast(values, values);
      { execution.is_far_from(other) } -> std::same_as<bool>;
    };

/// Enqueues on a stream: `synchronize` blocks the host until it is empty, and throws its fault.
template <class C>
concept StreamCommunicator = Communicator<C> && requires(C& comm) { comm.synchronize(); };

/// `order_streams` makes every rank's stream wait for all ranks' work so far. **Ranks** all.
template <class C>
concept StreamOrdering = StreamCommunicator<C> && requires(C& comm) { comm.order_streams(); };

/// `capture(f)` returns the work that `f` enqueues as a graph, or the reason why there is none, and
/// does not throw; `replay` enqueues a graph of the same capture. **Ranks** all.
template <class C>
concept CapturingCommunicator = StreamCommunicator<C> && requires(C& comm, void (*f)()) {
  { static_cast<bool>(comm.capture(f)) } -> std::same_as<bool>;
  { comm.capture(f).reason() } -> std::convertible_to<std::string>;
  comm.replay(comm.capture(f));
};

/// A communicator whose graphs hold the work of all ranks, which capture and replay together.
template <class C>
concept JointlyCapturing = CapturingCommunicator<C> && C::captures_jointly;

}  // namespace lockstep::detail
