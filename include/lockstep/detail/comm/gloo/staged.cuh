// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gloo for ranks on GPUs, flat and between hosts.

#include "lockstep/detail/comm/hierarchical/gloo.hpp"
#include "lockstep/detail/comm/staged.cuh"

namespace lockstep {

/// Gloo for ranks on GPUs, through pinned memory of the host.
template <std::size_t Ranks = dynamic>
using StagedGloo = StagedCommunicator<GlooCommunicator<Ranks>>;
/// A hierarchy for ranks on GPUs. Ranks of one host share the pinned memory and reduce in it.
using StagedHierarchy =
    StagedCommunicator<HierarchicalCommunicator<ShmCommunicator<>, GlooCommunicator<>>>;

/// Creates the Gloo communicator of a job, for device memory of each rank's GPU (`gpu_of`); `name`
/// distinguishes several of one job. **Ranks** all. **Host** blocks until all have joined.
template <std::size_t Ranks = dynamic>
StagedGloo<Ranks> make_staged_gloo_communicator(const Membership& member, Store& store,
                                                const std::string& name = "world") {
  std::shared_ptr<Gpu> gpu = detail::gpu_of_process(member, store, name);
  return {make_gloo_communicator<Ranks>(member, store, name), std::move(gpu)};
}

/// The same with shared memory inside hosts, which must have equally many ranks, and Gloo between
/// them. **Ranks** all. **Host** blocks until all have joined.
inline StagedHierarchy make_staged_hierarchical_communicator(const Membership& member, Store& store,
                                                             const std::string& name = "world") {
  std::shared_ptr<Gpu> gpu = detail::gpu_of_process(member, store, name);
  return {make_hierarchical_communicator(member, store, name), std::move(gpu)};
}

}  // namespace lockstep
