// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Losses that a GPU is still computing, one by one and added up.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "lockstep/core/error.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/memory.cuh"

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

/// Adds a loss to the sum, and writes it to `shown`, host memory in which the host sees the latest
/// loss without waiting. A template, because a kernel in a header cannot be inline.
template <class T>
LOCKSTEP_KERNEL add_loss(const T* loss, T samples, T* sum, T* shown) {
  *sum += *loss * samples;
  *shown = *loss;
}

/// Losses of an epoch, added up on the GPU.
template <class Comm>
class DeviceLossMeter {
 public:
  explicit DeviceLossMeter(Comm& comm)
      : comm_(&comm), sum_(sizeof(double)), shown_(sizeof(double)) {}

  void reset() {
    check_cuda(cudaMemsetAsync(sum_.data(), 0, sum_.bytes(), comm_->gpu().stream()),
               "cudaMemsetAsync");
  }

  /// **Stream** after the forward pass.
  void add(const DeviceLoss<Comm>& loss, std::size_t samples) {
    add_loss<<<1, 1, 0, comm_->gpu().stream()>>>(loss.device_data(), static_cast<double>(samples),
                                                 reinterpret_cast<double*>(sum_.data()),
                                                 reinterpret_cast<double*>(shown_.data()));
    check_launch("add_loss");
  }

  /// The latest loss that the GPU has added. **Host** does not block.
  double latest() const { return *reinterpret_cast<const volatile double*>(shown_.data()); }

  /// **Host** blocks.
  double sum() const {
    comm_->synchronize();
    double sum = 0;
    copy_now(&sum, sum_.data(), sizeof sum);
    return sum;
  }

 private:
  Comm* comm_;
  DeviceArena sum_;
  PinnedArena shown_;
};

}  // namespace lockstep::detail
