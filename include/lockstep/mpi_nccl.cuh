// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everything a GPU job needs, NCCL and MPI included, and one inside hosts and the other
/// between them.

#include "lockstep/mpi.cuh"
#include "lockstep/nccl.cuh"

namespace lockstep {

/// Ranks are processes. What crosses the network goes through pinned memory of the host.
template <class Transport>
  requires detail::is_mpi<Transport>
struct Connection<Cuda, Hierarchical<Nccl, Transport>> {
  template <class Policies>
  static auto make(Session& session, const std::string& name = "world") {
    const Membership& member = session.membership();
    std::shared_ptr<Gpu> gpu = detail::gpu_of_process(member, session.store(), name);
    auto side = std::make_shared<Gpu>(gpu->rank(), gpu->index());
    detail::over_mpi::Process::get().require_threads();
    auto hierarchy = detail::make_hierarchy(
        member, session.store(), name,
        [&](const Membership& all, Store& store, const std::string& known) {
          auto inner = make_mpi_communicator<dynamic, Callers, Transport>(all, store, known);
          return StagedCommunicator<decltype(inner)>(std::move(inner), side);
        },
        [&](const Membership& local, Store& store, const std::string& known) {
          return NcclCommunicator<>(local, store, known, side);
        });
    return StreamedCommunicator<decltype(hierarchy)>(std::move(hierarchy), std::move(gpu), side);
  }
};

}  // namespace lockstep
