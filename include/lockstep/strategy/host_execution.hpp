// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file DDP's work on the host: plain loops, done when the call returns.

#include <cstddef>
#include <cstring>
#include <span>

#include "lockstep/bucket/bare_step.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/device/device.hpp"
#include "lockstep/device/host_arena.hpp"
#include "lockstep/strategy/updater.hpp"

namespace lockstep {

/// What DDP leaves to a device: memory, steps, batches, losses, and the optimizer. Specialised for
/// every device; `Cuda`'s is in strategy/gpu_execution.cuh, which only nvcc can compile.
template <class Device, class Traits, class Comm>
class Execution;

/// Losses of an epoch, added up.
class LossMeter {
 public:
  void reset() { sum_ = 0; }
  void add(double loss, std::size_t samples) {
    latest_ = loss;
    sum_ += loss * static_cast<double>(samples);
  }
  double latest() const { return latest_; }
  double sum() const { return sum_; }

 private:
  double latest_ = 0;
  double sum_ = 0;
};

template <class Traits, class Comm>
class Execution<Cpu, Traits, Comm> {
 public:
  using Arena = HostArena;
  using Loss = double;
  using Meter = LossMeter;
  using Step = typename Traits::bare_step;
  template <class Reducer>
  using UpdaterOf = Updater<Traits, Comm, Reducer>;

  constexpr explicit Execution(Comm&) {}

  /// What the model sees of these arenas.
  template <class Model>
  static Step step(const Model& model, Arenas arenas) {
    return Step(model, arenas);
  }

  template <class Reducer>
  static UpdaterOf<Reducer> updater(Comm& comm, const typename Traits::layout& layout,
                                    std::byte* parameters) {
    return UpdaterOf<Reducer>(comm, layout, parameters);
  }

  /// A batch where the model can read it.
  template <class Batch>
  static const Batch& place(const Batch& batch) {
    return batch;  // NOLINT(bugprone-return-const-ref-from-parameter): no temporary comes here
  }
  template <class Batch>
  static const Batch& place(const Batch&& batch) = delete;  // it would be gone by backward

  template <class Model, class TheStep, class Batch>
  static double forward(Model& model, TheStep& step, const Batch& batch) {
    return static_cast<double>(model.forward(step, batch));
  }

  /// The loss of all replicas' outputs.
  template <class Model, class TheStep, class Batch, class Outputs, class Gradients>
  static double loss(Model& model, TheStep& step, const Batch& batch, const Outputs& outputs,
                     const Gradients& gradients) {
    return static_cast<double>(model.loss(step, batch, outputs, gradients));
  }

  /// Replicas on a host have the same memory.
  static constexpr bool is_far_from(const Execution&) { return false; }
  static void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    std::memcpy(to, from, bytes);
  }

  static Meter meter() { return {}; }

  /// sum += more.
  template <class T>
  static void add(std::span<T> sum, std::span<const T> more) {
    using A = Accumulator<T>;
    for (std::size_t i = 0; i != sum.size(); ++i)
      sum[i] = static_cast<T>(static_cast<A>(sum[i]) + static_cast<A>(more[i]));
  }

  /// values *= factor.
  template <class T>
  static void scale(std::span<T> values, double factor) {
    using A = Accumulator<T>;
    for (T& value : values) value = static_cast<T>(static_cast<A>(value) * static_cast<A>(factor));
  }

  static void zero(std::byte* data, std::size_t bytes) { std::memset(data, 0, bytes); }

  /// Calls `write(parameters, buffers)` with host memory in the layouts in which the model declares
  /// them; what is there then is in the arenas.
  template <class Model, class Updating, class Write>
  static void initialize(const Model&, Arenas arenas, const Updating&, const Write& write) {
    write(arenas.parameters, arenas.buffers);
  }
};

}  // namespace lockstep
