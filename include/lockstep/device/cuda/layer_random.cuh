// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The random numbers of a layer whose step runs on a GPU.

#include <cuda_runtime.h>

#include <cstdint>

#include "lockstep/core/random_stream.hpp"

namespace lockstep {

/// What `step.random("noise"_p)` gives on a GPU, as an argument for kernels. It holds where the
/// micro-batch's key lies, not the key: a captured step draws other numbers in every replay.
///
///     __global__ void add_noise(DeviceLayerRandom random, float* x, std::size_t n) {
///       const LayerRandom numbers = random.numbers();
///       ... x[i] += numbers.uniform(i);
class DeviceLayerRandom {
 public:
  constexpr DeviceLayerRandom() = default;
  constexpr DeviceLayerRandom(const std::uint64_t* key, detail::LayerHash layer)
      : key_(key), layer_(layer) {}

  /// In device code.
  __device__ LayerRandom numbers() const { return detail::layer_random(*key_, layer_); }

 private:
  const std::uint64_t* key_ = nullptr;
  detail::LayerHash layer_;
};

}  // namespace lockstep
