// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What communicators for host memory do for device memory, through staging.

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "comm/exercise.hpp"
#include "gpu/emulated/cuda.hpp"
#include "gpu/exercise.cuh"
#include "lockstep/detail/comm/staged.cuh"

namespace ranks {

/// Ranks of a rendezvous, each with a GPU.
template <class Rendezvous>
class Staged : public Rendezvous {
 public:
  using Rendezvous::Rendezvous;
  auto join(Rank rank, WorldSize world, std::chrono::milliseconds timeout) const {
    auto gpu = std::make_shared<lockstep::Gpu>(rank, 0);
    auto inner = Rendezvous::join(rank, world, timeout);
    return StagedCommunicator<decltype(inner)>(std::move(inner), std::move(gpu));
  }
};
template <class Rendezvous>
Ends run_staged(std::size_t world, auto f, std::chrono::milliseconds timeout = 20s) {
  return run_processes<Rendezvous>(world, timeout, f);
}

/// Elements of a call that has one piece at most.
template <class T>
constexpr std::size_t whole(std::size_t in_rows = 1, std::size_t out_rows = 0) {
  return staged::Transfer<T>{0, in_rows, out_rows, nullptr, nullptr}.width();
}

template <class Rendezvous>
void every_type() {
  for (const std::size_t world : {1, 2, 4}) {
    expect_all_fine(run_staged<Rendezvous>(world, [](auto& comm) {
      exercise::every_operation<float>(comm);
      exercise::every_operation<std::int16_t>(comm);
      exercise::every_operation<double>(comm);
      exercise::every_operation<Half>(comm);
      exercise::every_operation<BFloat16>(comm);
      exercise::every_operation<std::uint8_t>(comm);
      exercise::every_operation<std::int64_t>(comm);
      exercise::nan_wins<float>(comm);
      for (const bool on_host : {false, true}) {
        exercise::reductions<float>(comm, 0, on_host, Sum{});
        exercise::movements<float>(comm, 0, on_host);
      }
    }));
  }
}

/// Around the ends of pieces, of calls with one row and with one for each rank.
template <class Rendezvous>
void pieces(std::size_t world, std::size_t most) {
  expect_all_fine(run_staged<Rendezvous>(world, [&](auto& comm) {
    for (const std::size_t n : {whole<double>(), whole<double>() + 1, 2 * whole<double>() + 77})
      if (n <= most) exercise::reductions<double>(comm, n, false, Average{});
    for (const std::size_t n : {whole<double>(1, world), whole<double>(world, world) + 1})
      exercise::movements<double>(comm, n, false);
    exercise::reductions<Half>(comm, whole<Half>(world, 1) + 1, false, Sum{});
  }));
}

/// Calls of one and of several pieces, under way at the same time.
inline void in_flight(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  const std::size_t world = comm.world_size().value();
  const std::size_t me = comm.rank().value();
  const auto mine = [&](std::size_t i) { return exercise::value<float>(me, i); };
  exercise::Buffer<Comm, float> large(comm, 3 * whole<float>() + 5, false);
  exercise::Buffer<Comm, float> small(comm, 100, false);
  exercise::Buffer<Comm, float> host(comm, 1000, true);
  for (int round = 0; round < 3; ++round) {
    large.fill(mine);
    small.fill(mine);
    host.fill(mine);
    {
      auto a = comm.all_reduce_async(large.span(), Sum{});
      auto b = comm.all_reduce_async(small.span(), Max{});
      auto c = comm.all_reduce_async(host.span(), Average{});
      if (round == 0) c.wait();
      if (round == 1) {
        std::vector<int> one{1};
        comm.all_reduce(one);
        require(one[0] == static_cast<int>(world), "a call behind those under way");
      }
      while (round == 2 && !a.test()) std::this_thread::yield();
    }  // all wait here
    large.expect("large", exercise::all_reduced<float>(Sum{}, world));
    small.expect("small", exercise::all_reduced<float>(Max{}, world));
    host.expect("host", exercise::all_reduced<float>(Average{}, world));
  }
}

}  // namespace ranks
