// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Threads of one process inside hosts, and between hosts an NCCL communicator per local
/// rank: one of all ranks would connect inside hosts too, and reject ranks that share a GPU.

#include "lockstep/detail/comm/hierarchical/two_levels.hpp"
#include "lockstep/detail/comm/nccl/communicator.cuh"
#include "lockstep/detail/comm/streamed.cuh"
#include "lockstep/detail/comm/threads/communicator.cuh"

namespace lockstep {

namespace detail {
using ThreadedNcclLevels = TwoLevels<ThreadCommunicator<>, NcclCommunicator<>>;
using ThreadedNcclStages =
    HierarchyStages<ThreadCommunicator<>, NcclCommunicator<>, ThreadedNcclLevels>;
using ThreadedNcclHierarchy =
    HierarchicalCommunicator<ThreadCommunicator<>, NcclCommunicator<>, ThreadedNcclLevels>;
}  // namespace detail

/// Ranks that are threads of one process per host, with NCCL between hosts.
using ThreadedNccl = StreamedCommunicator<detail::ThreadedNcclHierarchy>;
static_assert(ArenaAllocating<ThreadedNccl> && AsyncReducing<ThreadedNccl> &&
              Splitting<ThreadedNccl>);

/// Creates the communicator of a job with one process per host, whose threads are the ranks; `name`
/// distinguishes several of one job. **Ranks** all. **Host** blocks until all have joined.
inline ThreadedNccl make_threaded_nccl_communicator(const Membership& member, Store& store,
                                                    const std::string& name,
                                                    std::shared_ptr<Gpu> gpu) {
  if (member.world.value() % member.process_ranks != 0) {
    detail::fail(
        "Backend<Hierarchical<Shm, Nccl>>",
        {"the world has ", member.world.value(), " ranks and this process ", member.process_ranks},
        "start equally many ranks in every process", member.rank);
  }
  std::vector<std::size_t> process_of_rank(member.world.value());
  for (std::size_t r = 0; r < process_of_rank.size(); ++r)
    process_of_rank[r] = r / member.process_ranks;
  detail::Hosts hosts(process_of_rank);
  const std::size_t host = hosts.host(member.rank);
  const std::size_t position = hosts.local_rank(member.rank);
  auto side = std::make_shared<Gpu>(gpu->rank(), gpu->index());

  Membership local = detail::in_group(member, Rank{position}, WorldSize{member.process_ranks});
  local.timeout += detail::inside_margin;
  auto inside =
      ThreadCommunicator<>::join(local, store, side, name + " of process " + std::to_string(host));

  const Membership column = detail::in_group(member, Rank{host}, WorldSize{hosts.count()});
  const std::string between_name = name + ", position " + std::to_string(position);
  NcclCommunicator<> between(column, store, between_name, side, false);
  auto stages = std::make_unique<detail::ThreadedNcclStages>(
      std::move(hosts), std::move(inside), std::move(between),
      "hierarchy/" + detail::numbered_rendezvous(store, member.rank, "hierarchy", name));
  detail::by_turns(stages->inside(), position, member.process_ranks,
                   [&] { stages->between().warm_up(); });
  return {detail::ThreadedNcclHierarchy(std::move(stages)), std::move(gpu), std::move(side)};
}

/// The same with the GPU of each thread's local rank.
inline ThreadedNccl make_threaded_nccl_communicator(const Membership& member, Store& store,
                                                    const std::string& name = "world") {
  return make_threaded_nccl_communicator(member, store, name,
                                         detail::gpu_of_process(member, store, name));
}

}  // namespace lockstep
