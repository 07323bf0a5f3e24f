// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The groups of parameters, where a GPU's kernels can look them up.

#include <cstddef>

#include "lockstep/bucket/group_pieces.hpp"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/optim/update.cuh"
#include "lockstep/strategy/replica_traits.hpp"

namespace lockstep::detail {

/// Where groups begin and end, in device memory. In a job without groups there is nothing in it.
template <class Traits>
class GpuGroups {
 public:
  explicit GpuGroups(const typename Traits::layout& where) : groups_(where), pieces_(upload()) {}

  /// For a kernel that works on memory from `offset` on.
  GroupPieces from(std::size_t offset) const {
    return {reinterpret_cast<const GroupPiece*>(pieces_.data()), groups_.table.size, offset};
  }

  std::size_t of([[maybe_unused]] std::size_t parameter) const {
    if constexpr (Traits::has_groups) return groups_.table.groups[parameter];
    return 0;
  }

 private:
  DeviceArena upload() const {
    if constexpr (Traits::has_groups) {
      const auto& table = groups_.table;
      DeviceArena pieces(table.size * sizeof(GroupPiece));
      copy_now(pieces.data(), table.begin(), pieces.bytes());
      return pieces;
    } else {
      return DeviceArena(0);
    }
  }

  [[no_unique_address]] GroupsOf<Traits> groups_;
  DeviceArena pieces_;
};

}  // namespace lockstep::detail
