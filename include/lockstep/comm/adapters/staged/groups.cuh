// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Staged communicators of some of the ranks, wherever the inner one makes groups. They share
/// their parent's GPU and compute stream.

#include <optional>
#include <utility>
#include <vector>

#include "lockstep/comm/adapters/staged/communicator.cuh"
#include "lockstep/core/strong.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep {

/// A communicator of the listed ranks, in the listed order; nothing on the others. **Ranks** all of
/// `parent`, members or not, with the same list. **Host** blocks until the members have met.
template <class Inner>
auto new_group(StagedCommunicator<Inner>& parent, const std::vector<Rank>& members) {
  auto inner = new_group(parent.drained(), members);
  std::optional<StagedCommunicator<typename decltype(inner)::value_type>> group;
  if (inner) group.emplace(std::move(*inner), parent.shared_gpu());
  return group;
}

/// The group of `topology` that this rank is in. **Ranks** all of `parent`. **Host** blocks.
template <Topology T, class Inner>
auto join_groups(StagedCommunicator<Inner>& parent, const T& topology = {}) {
  auto inner = join_groups(parent.drained(), topology);
  return StagedCommunicator<decltype(inner)>(std::move(inner), parent.shared_gpu());
}

}  // namespace lockstep
