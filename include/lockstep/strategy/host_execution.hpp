// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The execution of the host: plain loops, done when the call returns.

#include <cstddef>
#include <cstring>
#include <span>

#include "lockstep/bucket/step.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/device/device.hpp"
#include "lockstep/optim/anomaly.hpp"
#include "lockstep/strategy/concepts.hpp"
#include "lockstep/strategy/host_update.hpp"
#include "lockstep/strategy/initial_values.hpp"
#include "lockstep/strategy/replica_traits.hpp"

namespace lockstep::detail {

/// Losses of an epoch, added up. Where steps that are not finite are skipped, their losses are,
/// too.
template <bool Skips>
class LossMeter {
 public:
  void reset() { totals_ = {}; }
  void add(double loss, std::size_t samples) {
    latest_ = loss;
    if constexpr (Skips) {
      if (!is_finite(loss)) return;
    }
    totals_.sum += loss * static_cast<double>(samples);
    totals_.samples += static_cast<double>(samples);
  }
  double latest() const { return latest_; }
  LossTotals totals() const { return totals_; }
  /// Goes on from the totals of another meter.
  void set_totals(const LossTotals& totals) { totals_ = totals; }

 private:
  double latest_ = 0;
  LossTotals totals_;
};

template <class Traits, class Comm>
class DeviceExecution<Cpu, Traits, Comm> {
 public:
  using Arena = HostArena;
  using Loss = double;
  using Meter = LossMeter<Traits::skips_anomalies>;
  using Step = typename Traits::bare_step;
  using UpdatePasses = HostUpdate<Traits, Comm>;
  /// Every thread is on the host already.
  struct OnDevice {
    constexpr explicit OnDevice(const Comm&) {}
    static constexpr void select(const Comm&) {}
  };
  struct BuiltOnDevice {
    constexpr explicit BuiltOnDevice(const Comm&) {}
    static constexpr void leave() {}
    static constexpr void return_to(const Comm&) {}
  };

  constexpr explicit DeviceExecution(Comm&) { static_assert(Execution<DeviceExecution>); }

  static Step step(const TensorLayouts<Traits>& layouts, Arenas arenas) {
    return Step(layouts.parameters, layouts.buffers, arenas);
  }

  template <class Batch>
  static const Batch& place(const Batch& batch) {
    return batch;  // NOLINT(bugprone-return-const-ref-from-parameter): no temporary comes here
  }
  template <class Batch>
  static const Batch& place(const Batch&& batch) = delete;  // it would be gone by backward

  template <class Model, class StepType, class Batch>
  static double forward(Model& model, StepType& step, const Batch& batch) {
    return static_cast<double>(model.forward(step, batch));
  }
  template <class Model, class StepType, class Batch, class Outputs, class Gradients>
  static double loss(Model& model, StepType& step, const Batch& batch, const Outputs& outputs,
                     const Gradients& gradients) {
    return static_cast<double>(model.loss(step, batch, outputs, gradients));
  }

  /// Replicas on a host share their memory.
  static constexpr bool is_far_from(const DeviceExecution&) { return false; }
  static void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    std::memcpy(to, from, bytes);
  }
  static void zero(std::byte* data, std::size_t bytes) { std::memset(data, 0, bytes); }

  static Meter meter() { return {}; }

  template <class T>
  static void add(std::span<T> sum, std::span<const T> more) {
    using A = Accumulator<T>;
    for (std::size_t i = 0; i != sum.size(); ++i)
      sum[i] = static_cast<T>(static_cast<A>(sum[i]) + static_cast<A>(more[i]));
  }
  template <class T>
  static void scale(std::span<T> values, double factor) {
    using A = Accumulator<T>;
    for (T& value : values) value = static_cast<T>(static_cast<A>(value) * static_cast<A>(factor));
  }
  template <class To, class From>
  static void cast(std::span<To> to, std::span<From> from) {
    convert(to.data(), from.data(), to.size());
  }

  template <class Write>
  static void initialize(const typename Traits::model&, Arenas arenas, std::byte* /*masters*/,
                         const Write& write) {
    write(ArenaValues{arenas.parameters}, ArenaValues{arenas.buffers});
  }
};

}  // namespace lockstep::detail
