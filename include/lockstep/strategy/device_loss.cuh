// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Losses that a GPU is still computing, one by one and added up.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "lockstep/core/error.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/launch.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/optim/anomaly.hpp"
#include "lockstep/strategy/concepts.hpp"

namespace lockstep::detail {

/// The loss of the latest forward pass. The host waits for it when it is converted to a number.
template <class Comm>
class DeviceLoss {
 public:
  /// `forwards` counts the passes that have written to `value`.
  DeviceLoss(Comm& comm, const double* value, const std::uint64_t& forwards)
      : comm_(&comm), value_(value), forwards_(&forwards), number_(forwards) {}

  /// **Host** blocks until the GPU has computed it.
  operator double() const {
    if (*forwards_ != number_) {
      throw Error("loss", "a later forward pass has overwritten it",
                  "read a loss before the next step, or let loss_meter() add them up",
                  comm_->rank());
    }
    const OnGpu current(comm_->gpu().index());
    comm_->synchronize();
    double loss = 0;
    copy_now(&loss, value_, sizeof loss);
    return loss;
  }

  const double* device_data() const { return value_; }

 private:
  Comm* comm_;
  const double* value_;
  const std::uint64_t* forwards_;
  std::uint64_t number_;
};

/// Adds a loss to the totals, and writes it to `shown`, host memory in which the host sees the
/// latest loss without waiting. A template, because a kernel in a header cannot be inline.
template <bool Skips, class T>
LOCKSTEP_KERNEL add_loss(const double* loss, T samples, LossTotals* totals, T* shown) {
  *shown = *loss;
  if (Skips && !is_finite(*loss)) return;
  totals->sum += *loss * samples;
  totals->samples += samples;
}

/// Losses of an epoch, added up on the GPU, as `LossMeter` does on the host.
template <class Comm, bool Skips>
class DeviceLossMeter {
 public:
  explicit DeviceLossMeter(Comm& comm)
      : comm_(&comm), shown_(sizeof(double)), totals_(sizeof(LossTotals)) {}

  void reset() {
    const OnGpu current(comm_->gpu().index());
    check_cuda(cudaMemsetAsync(totals_.data(), 0, totals_.bytes(), comm_->gpu().stream()),
               "cudaMemsetAsync");
  }

  /// **Stream** after the forward pass.
  void add(const DeviceLoss<Comm>& loss, std::size_t samples) {
    const OnGpu current(comm_->gpu().index());
    launch_kernel<add_loss<Skips, double>>(
        "add_loss", comm_->gpu().stream(), 1, 1, loss.device_data(), static_cast<double>(samples),
        reinterpret_cast<LossTotals*>(totals_.data()), reinterpret_cast<double*>(shown_.data()));
  }

  /// The latest loss that the GPU has added. **Host** does not block.
  double latest() const { return *reinterpret_cast<const volatile double*>(shown_.data()); }

  /// **Host** blocks.
  LossTotals totals() const {
    const OnGpu current(comm_->gpu().index());
    comm_->synchronize();
    LossTotals totals;
    copy_now(&totals, totals_.data(), sizeof totals);
    return totals;
  }
  /// Goes on from the totals of another meter. **Host** blocks.
  void set_totals(const LossTotals& totals) {
    const OnGpu current(comm_->gpu().index());
    comm_->synchronize();
    copy_now(totals_.data(), &totals, sizeof totals);
  }

 private:
  Comm* comm_;
  PinnedArena shown_;
  DeviceArena totals_;  // is freed first, which waits for kernels that write to `shown_`
};

}  // namespace lockstep::detail
