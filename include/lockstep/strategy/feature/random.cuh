// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Where the random numbers of a GPU's steps come from.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lockstep/device/cuda/launch.cuh"
#include "lockstep/device/cuda/layer_random.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/device.hpp"
#include "lockstep/strategy/feature/random.hpp"

namespace lockstep::detail {

/// The keys lie in device memory, as all numbers do that change from step to step: what reads them
/// may be replayed as part of a graph.
template <class Comm>
class RandomKeyStore<Cuda, Comm> {
 public:
  explicit RandomKeyStore(Comm& comm) : comm_(comm), memory_(sizeof(RandomKeys)) {}
  RandomKeys* keys() const { return reinterpret_cast<RandomKeys*>(memory_.data()); }
  /// `key` is an address of device memory, which the host does not read.
  static DeviceLayerRandom draw(const std::uint64_t* key, LayerHash layer) { return {key, layer}; }
  void store(const RandomKeys& keys) { launch_store(comm_.gpu().stream(), this->keys(), keys); }

 private:
  Comm& comm_;
  DeviceArena memory_;
};

}  // namespace lockstep::detail
