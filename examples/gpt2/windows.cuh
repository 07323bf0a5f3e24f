// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The tokens of a batch.

#include <cstddef>
#include <cstdint>

#include "lockstep/lockstep.cuh"

namespace gpt2 {

/// Tokens of windows of `length` places; one more follows each, which the last place predicts.
struct Windows {
  const std::uint16_t* tokens;
  const float* weights;  // of windows
  std::size_t count;
  std::size_t length;

  LOCKSTEP_HOST_DEVICE std::size_t places() const { return count * length; }
  __device__ unsigned token(std::size_t place) const { return tokens[index(place)]; }
  __device__ unsigned next(std::size_t place) const { return tokens[index(place) + 1]; }
  __device__ std::size_t index(std::size_t place) const { return place + place / length; }
};

}  // namespace gpt2
