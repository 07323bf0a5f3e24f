// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a replica leaves to the device that it is on.

#include <concepts>
#include <cstddef>
#include <span>

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

/// Its losses are made while the host goes on. `latest_loss` is that of the latest forward pass;
/// `average_loss(weight)` makes it the mean of all ranks' losses; `note_forward` counts a pass that
/// ran as part of a graph.
template <class E>
concept LossDeferring = Execution<E> && requires(E& execution) {
  { execution.latest_loss() } -> std::same_as<typename E::Loss>;
  execution.average_loss(0.5);
  execution.note_forward();
};

}  // namespace lockstep::detail
