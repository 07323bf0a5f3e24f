// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Anomalies on a GPU: kernels note what they find, and the host looks when it makes the next
/// step.

#include <cuda_runtime.h>

#include <cstdint>

#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/optim/anomaly.hpp"

namespace lockstep::detail {

/// Notes the step, and raises the flag that the host reads. Threads that do it at once write the
/// same.
__device__ inline void tell_anomaly(const AnomalyWatch& watch, std::uint64_t step) {
  watch.record->step = step;
  *watch.seen = 1;
}

/// The memory in which kernels note anomalies, where a step that is not finite ends the job
/// (`Anomaly<Stop>`); otherwise there is nothing in it.
template <class Traits, class Comm>
class GpuAnomaly {
  static constexpr bool stops = Traits::stops_at_anomaly;

 public:
  /// Do update kernels look for one? Where losses are scaled, gradients that are not finite are
  /// part of the method: their steps are skipped, until the scale is too small.
  static constexpr bool watches = stops && !Traits::scales_loss;

  GpuAnomaly(Comm& comm, const typename Traits::layout& where, const double* loss)
      : comm_(comm),
        layout_(where),
        seen_(stops ? sizeof(std::uint32_t) : 0),
        found_(stops ? sizeof(AnomalyRecord) : 0),
        loss_(loss) {
    const AnomalyRecord nothing;
    if (stops) copy_now(found_.data(), &nothing, sizeof nothing);
  }

  AnomalyWatch watch() const {
    if constexpr (!stops) return {};
    return {reinterpret_cast<AnomalyRecord*>(found_.data()),
            reinterpret_cast<std::uint32_t*>(seen_.data()), loss_};
  }

  /// Throws if a kernel has told of an anomaly so far. **Host** does not block.
  void require_none_seen() const {
    if constexpr (stops) {
      // Set by a kernel, and read without waiting for it.
      if (*reinterpret_cast<const volatile std::uint32_t*>(seen_.data())) [[unlikely]]
        report();
    }
  }
  /// Throws if a step had an anomaly. **Host** blocks until all steps are done.
  void require_none() const {
    if constexpr (stops) {
      comm_.synchronize();
      require_none_seen();
    }
  }

 private:
  /// The job is over: kernels change nothing any more, and a later call says the same.
  [[noreturn, gnu::cold, gnu::noinline]] void report() const {
    comm_.synchronize();
    AnomalyRecord record;
    copy_now(&record, found_.data(), sizeof record);
    if (record.scale) {
      throw anomaly_error("so many steps in a row overflowed that the loss scale is nearly zero",
                          record.step)
          .on(comm_.rank());
    }
    if (record.loss) throw anomaly_error("the loss is not finite", record.step).on(comm_.rank());
    throw anomaly_error(layout_, record.gradient, "not finite",
                        Traits::alone ? "" : "as the average over ranks", record.step)
        .on(comm_.rank());
  }

  Comm& comm_;
  const typename Traits::layout& layout_;
  // A kernel may still write to host memory when this ends: device memory, which is freed first,
  // is freed when the GPU is done.
  PinnedArena seen_;   // is there an anomaly?
  DeviceArena found_;  // its record
  const double* loss_;
};

}  // namespace lockstep::detail
