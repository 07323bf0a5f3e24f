// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The memory that a shared-memory communicator has given out: a part for every rank, which
/// all can see, or one that all have in common.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/shm/memory_file.hpp"
#include "lockstep/core/bytes.hpp"

namespace lockstep::detail::shm {

/// The largest page size of common kernels.
inline constexpr std::size_t page = 64_KiB;

class Arenas {
 public:
  /// `rank` is this rank's number.
  explicit Arenas(std::size_t rank) : rank_(rank) {}

  /// How much a rank's part of `bytes` takes in the file.
  static constexpr std::size_t stride(std::size_t bytes) {
    return align_up(std::max<std::size_t>(bytes, 1), page);
  }

  /// Adds an arena that begins at `offset` of the file. Returns this rank's part.
  std::byte* add(Mapping mapping, std::size_t offset, std::size_t stride) {
    arenas_.push_back({std::move(mapping), offset, stride});
    return arenas_.back().mapping.data() + rank_ * stride;
  }

  /// Adds memory that all ranks have in common.
  std::byte* add_common(Mapping mapping) {
    common_.push_back(std::move(mapping));
    return common_.back().data();
  }

  /// The offset in the file of this rank's memory; nothing if it is not in one of its arenas.
  std::optional<std::uint64_t> locate(const void* data, std::size_t bytes) const {
    for (const Arena& arena : arenas_) {
      const std::byte* const begin = arena.mapping.data() + rank_ * arena.stride;
      const auto* const first = static_cast<const std::byte*>(data);
      if (first >= begin && first + bytes <= begin + arena.stride) {
        return arena.offset + static_cast<std::uint64_t>(first - arena.mapping.data());
      }
    }
    return std::nullopt;
  }

  /// The memory at an offset of the file, as this rank sees it.
  std::byte* at(std::uint64_t offset) const {
    for (const Arena& arena : arenas_) {
      if (offset - arena.offset < arena.mapping.bytes())
        return arena.mapping.data() + (offset - arena.offset);
    }
    return nullptr;
  }

 private:
  struct Arena {
    Mapping mapping;
    std::size_t offset;
    std::size_t stride;
  };

  std::size_t rank_;
  std::vector<Arena> arenas_;
  std::vector<Mapping> common_;
};

}  // namespace lockstep::detail::shm
