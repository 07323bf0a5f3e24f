// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The host memory through which GPUs exchange data that cannot reach each other's memory.

#include <algorithm>
#include <cstddef>

#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/memory.cuh"

namespace lockstep::detail::threads {

/// The most bytes of one rank that are under way through host memory at a time.
inline constexpr std::size_t most_staged_bytes = std::size_t{4} << 20;

/// Pinned memory, which every GPU can access. It is allocated when ranks join: allocating in a call
/// may wait for GPUs that wait for this call.
class Staging {
 public:
  /// Up to `most` bytes for each rank's part of a collective, as much for a result, and as much
  /// again for each rank's message; about 64 MiB of each for many ranks.
  Staging(std::size_t ranks, std::size_t most)
      : bytes_(std::clamp((std::size_t{64} << 20) / ranks, least(ranks),
                          std::max(most, least(ranks))) /
               least(ranks) * least(ranks)),
        ranks_(ranks),
        memory_((2 * ranks + 1) * bytes_) {}

  /// Of a slot. It is divided evenly among all ranks in whole packets.
  std::size_t bytes() const { return bytes_; }

  unsigned char* of(std::size_t rank) const { return slot(rank); }
  unsigned char* result() const { return slot(ranks_); }
  unsigned char* message_of(std::size_t rank) const { return slot(ranks_ + 1 + rank); }

 private:
  static std::size_t least(std::size_t ranks) { return ranks * 256; }
  unsigned char* slot(std::size_t number) const {
    return reinterpret_cast<unsigned char*>(memory_.data()) + number * bytes_;
  }

  std::size_t bytes_;
  std::size_t ranks_;
  PinnedArena memory_;
};

}  // namespace lockstep::detail::threads
