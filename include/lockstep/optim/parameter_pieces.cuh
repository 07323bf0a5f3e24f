// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which parameter lies where in an arena, in device memory, for kernels that treat each
/// parameter in its own way.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/bucket/group_pieces.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/optim/update.cuh"

namespace lockstep::detail {

/// The parameters of an arena, as a kernel finds them from a piece of it. A `GroupPiece` is one
/// parameter: its group is the parameter's number.
struct ParameterPieces {
  const GroupPiece* pieces;
  std::size_t count;
  std::size_t offset;   // bytes from the arena's start to the kernel's arrays
  std::size_t element;  // bytes of an element in the arena

  /// The parameter that holds an element of the kernel's arrays.
  __device__ const GroupPiece* at(std::size_t index) const {
    return group_piece(pieces, count, offset + index * element);
  }
  /// Does this parameter hold the element too?
  __device__ bool holds(const GroupPiece* piece, std::size_t index) const {
    return piece->end > offset + index * element;
  }
};

/// Pieces over all buckets of a plan. Bytes of buckets that no parameter has are those of a
/// parameter more, with the number behind the last.
template <class Plan>
std::vector<GroupPiece> make_parameter_pieces(const Plan& plan) {
  const std::size_t nobody = plan.placements.size();
  std::vector<GroupPiece> pieces;
  std::size_t end = 0;
  const auto skip_to = [&](std::size_t offset) {
    if (offset != end) pieces.push_back({offset, nobody});
  };
  for (std::size_t b = 0; b != plan.bucket_count; ++b) {
    for (const std::size_t p : plan.members(b)) {
      skip_to(plan.placements[p].offset);
      end = plan.placements[p].offset + align_up(plan.placements[p].bytes);
      pieces.push_back({end, p});
    }
  }
  skip_to(plan.bytes);
  return pieces;
}

}  // namespace lockstep::detail
