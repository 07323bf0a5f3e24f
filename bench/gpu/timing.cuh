// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How long work takes on the device.

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "lockstep/detail/device/cuda/runtime.cuh"
#include "measure.hpp"

namespace bench {

/// A point in a stream that knows its time.
class Mark {
 public:
  Mark() { lockstep::check_cuda(cudaEventCreate(&event_), "cudaEventCreate"); }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  ~Mark() { static_cast<void>(cudaEventDestroy(event_)); }

  void record(cudaStream_t stream) const {
    lockstep::check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord");
  }
  double microseconds_since(const Mark& begin) const {
    float milliseconds = 0;
    lockstep::check_cuda(cudaEventElapsedTime(&milliseconds, begin.event_, event_),
                         "cudaEventElapsedTime");
    return 1e3 * static_cast<double>(milliseconds);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Device times of contestants that take turns, so that noise hits all alike. All runs are enqueued
/// before the first is waited for: the device never waits for the host.
inline std::vector<Times> race_on_device(cudaStream_t stream,
                                         const std::vector<std::function<void()>>& contestants,
                                         std::size_t turns = 30) {
  for (const auto& run : contestants) run();
  const std::size_t count = contestants.size();
  std::vector<Mark> marks(turns * count + 1);
  marks[0].record(stream);
  for (std::size_t i = 0; i != turns * count; ++i) {
    contestants[i % count]();
    marks[i + 1].record(stream);
  }
  lockstep::check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  std::vector<Times> result;
  for (std::size_t c = 0; c != count; ++c) {
    std::vector<double> times;
    for (std::size_t t = 0; t != turns; ++t) {
      times.push_back(marks[t * count + c + 1].microseconds_since(marks[t * count + c]));
    }
    result.push_back(summary(times));
  }
  return result;
}

}  // namespace bench
