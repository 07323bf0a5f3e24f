// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gloo for GPUs: ranks are processes with a GPU each, on any number of hosts.

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "lockstep/comm/adapters/hierarchical/gloo.hpp"
#include "lockstep/comm/adapters/staged/communicator.cuh"
#include "lockstep/comm/backends/gloo/communicator.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/rank_gpu.cuh"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep {

/// Gloo for ranks on GPUs, through pinned memory of the host.
template <std::size_t Ranks = dynamic>
using StagedGloo = StagedCommunicator<GlooCommunicator<Ranks>>;
/// A hierarchy for ranks on GPUs. Ranks of one host share the pinned memory and reduce in it.
using StagedHierarchy =
    StagedCommunicator<HierarchicalCommunicator<ShmCommunicator<>, GlooCommunicator<>>>;

static_assert(ArenaAllocating<StagedGloo<>> && AsyncReducing<StagedGloo<2>> &&
              Splitting<StagedGloo<>>);
static_assert(ArenaAllocating<StagedHierarchy> && AsyncReducing<StagedHierarchy> &&
              Splitting<StagedHierarchy>);

/// A job's ranks through Gloo, each with the GPU that its place on its host gives it. `name` tells
/// several communicators of one job apart. **Ranks** all. **Host** blocks until all have come.
template <std::size_t Ranks = dynamic>
StagedGloo<Ranks> make_staged_gloo_communicator(const Membership& member, Store& store,
                                                const std::string& name = "world") {
  std::shared_ptr<Gpu> gpu = detail::gpu_of_process(member, store, name);
  return {make_gloo_communicator<Ranks>(member, store, name), std::move(gpu)};
}

/// A job's ranks through shared memory inside hosts, with the same number of ranks on each, and
/// Gloo between hosts. **Ranks** all. **Host** blocks until all have come.
inline StagedHierarchy make_staged_hierarchical_communicator(const Membership& member, Store& store,
                                                             const std::string& name = "world") {
  std::shared_ptr<Gpu> gpu = detail::gpu_of_process(member, store, name);
  return {make_hierarchical_communicator(member, store, name), std::move(gpu)};
}

}  // namespace lockstep
