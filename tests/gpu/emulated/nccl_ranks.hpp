// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks that meet through emulated NCCL, each a thread with an emulated GPU of its own.

#include "gpu/emulated/kernels.hpp"  // before the library's headers
//
#include <barrier>
#include <chrono>
#include <cstddef>
#include <memory>
#include <utility>

#include "gpu/emulated/machine.hpp"
#include "gpu/emulated/nccl.hpp"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/comm/nccl/communicator.cuh"
#include "lockstep/detail/store/server.hpp"

namespace nccl_ranks {

using namespace lockstep;
using namespace std::chrono_literals;

/// The ranks of a job, each a thread that has the GPU of its number.
struct Job {
  explicit Job(std::size_t world)
      : world(world), machine(world), together(static_cast<int>(world)) {}

  std::size_t world;
  emulated::Machine machine;
  detail::StoreServer server{"sesame"};
  std::barrier<> together;

  Membership member(Rank rank) const {
    Membership own;
    own.rank = rank;
    own.world = WorldSize{world};
    own.local_rank = rank.value();
    own.local_world = world;
    own.port = server.port();
    own.secret = "sesame";
    own.job = "emulated";
    own.timeout = 60s;
    return own;
  }

  /// `f(communicator)` on every rank, where `join(member, store, gpu)` makes the communicator.
  template <class Join, class F>
  void run(const Join& join, const F& f) {
    thread_ranks::expect_all_fine(participants::run_threads(world, [&](Rank rank) {
      const Membership own = member(rank);
      Store store(own.host, own.port, own.secret, 60s);
      auto comm = join(own, store, std::make_shared<Gpu>(rank, rank.value()));
      f(comm);
      comm.barrier();
    }));
  }

  /// How often CUDA was asked for memory, or for its end, by all ranks while they called `f()`.
  template <class F>
  std::size_t allocations(Rank rank, const F& f) {
    together.arrive_and_wait();
    if (rank == Rank{0}) emulated::take_tally();
    together.arrive_and_wait();
    f();
    together.arrive_and_wait();
    if (rank == Rank{0}) {
      const emulated::Tally tally = emulated::take_tally();
      found = tally.of("cudaMalloc") + tally.of("cudaFree") + tally.of("cudaMallocHost") +
              tally.of("cudaFreeHost");
    }
    together.arrive_and_wait();
    return found;
  }
  std::size_t found = 0;
};

template <class F>
void run_nccl(Job& job, const F& f) {
  job.run(
      [](const Membership& member, Store& store, std::shared_ptr<Gpu> gpu) {
        return NcclCommunicator<>(member, store, "world", std::move(gpu));
      },
      f);
}

}  // namespace nccl_ranks
