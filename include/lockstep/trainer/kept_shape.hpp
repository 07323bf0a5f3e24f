// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What the policies of a job mean for its checkpoints.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::detail {

/// It is the same on all ranks.
struct KeptShape {
  std::size_t world = 1;     ///< ranks that save or load together
  std::size_t replicas = 1;  ///< who have gradients of their own: ranks, or replicas of DP
  /// An update takes the sum of all replicas' gradients divided by this.
  double gradient_divisor = 1;
  std::size_t micro_batches = 1;   ///< of a step
  bool keeps_own_buffers = false;  ///< do replicas have buffers of their own?
  std::vector<std::string> policies;
  std::uint64_t fingerprint = 0;
};

}  // namespace lockstep::detail
