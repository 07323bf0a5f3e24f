// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of a GPU's updater that ends a job whose losses or gradients are not finite
/// (`Anomaly<Stop>`).

#include <cstddef>
#include <cstdint>

#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/optim/anomaly.hpp"
#include "lockstep/strategy/anomaly_error.hpp"
#include "lockstep/strategy/watched_averages.hpp"

namespace lockstep::detail {

/// A base of the updater. Kernels write down what they find, and the host looks when it makes the
/// next step.
template <class Traits, class Comm>
class GpuAnomaly {
 public:
  /// Throws if a step had an anomaly. **Host** blocks until all steps are done.
  void require_finite() {
    if constexpr (stops) {
      comm_.synchronize();
      require_none_seen();
    }
  }

 protected:
  GpuAnomaly(Comm& comm, const typename Traits::layout& where, const double* loss)
      : comm_(comm),
        layout_(where),
        seen_(stops ? sizeof(std::uint32_t) : 0),
        found_(stops ? sizeof(AnomalyRecord) : 0),
        loss_(loss) {
    const AnomalyRecord nothing;
    if (stops) copy_now(found_.data(), &nothing, sizeof nothing);
  }

  /// Does a step that is not finite end the job?
  static constexpr bool stops = Traits::stops_at_anomaly;
  /// Do update kernels look for one? Where losses are scaled, gradients that are not finite are
  /// part of the method: their steps are skipped, until the scale is too small.
  static constexpr bool watches = stops && !Traits::scales_loss;

  /// Throws if a kernel has told of an anomaly so far. **Host** does not block.
  void require_none_seen() const {
    if constexpr (stops) {
      // Set by a kernel, and read without waiting for it.
      if (*reinterpret_cast<const volatile std::uint32_t*>(seen_.data())) [[unlikely]]
        report();
    }
  }

  AnomalyWatch watch() const {
    if constexpr (!stops) return {};
    return {reinterpret_cast<AnomalyRecord*>(found_.data()),
            reinterpret_cast<std::uint32_t*>(seen_.data()), loss_};
  }

  Comm& comm_;
  const typename Traits::layout& layout_;
  WatchedAverages averages_;

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
    throw anomaly_error(layout_, averages_.offset_of(record.gradient), "not finite",
                        Traits::alone ? "" : "as the average over ranks", record.step)
        .on(comm_.rank());
  }

  // A kernel may still write to host memory when this ends: device memory, which is freed first,
  // is freed when the GPU is done.
  PinnedArena seen_;   // is there an anomaly?
  DeviceArena found_;  // its record
  const double* loss_;
};

}  // namespace lockstep::detail
