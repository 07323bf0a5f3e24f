// SPDX-License-Identifier: Apache-2.0
// How long an all-reduce (sum of float) takes: lockstep on memory of its own and on private memory,
// beside shared memory staged plainly, Gloo over loopback, and what memcpy of as many bytes takes;
// then through MPI, on ranks that mpirun starts.
// Ranks are processes. All ways take turns in one run; a batch counts from the first rank's start
// to the last one's end. Arguments: the world sizes to run, all of them if none is given.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "load.hpp"
#include "lockstep/detail/comm/shm/communicator.hpp"
#include "mpi.hpp"
#include "peers.hpp"
#include "report.hpp"
#include "safety.hpp"

namespace {

using namespace bench;
using lockstep::detail::shm::Engine;

constexpr std::chrono::seconds time_limit{180};
constexpr std::size_t most_bytes = sizes.back();
constexpr std::size_t most_count = most_bytes / sizeof(float);

template <class F>
auto repeat(F once) {
  return [once](std::size_t count, std::size_t iterations) {
    for (std::size_t i = 0; i < iterations; ++i) once(count);
  };
}

/// What the ranks of a world share.
struct Common {
  Track track;
  std::atomic<std::size_t> without_gloo;  // ranks that could not connect
};

template <std::size_t W>
void run_world(std::array<Row, sizes.size()>& rows, Results& results, Clock::time_point deadline) {
  const TemporaryFolder folder;
  const SharedMemory common_memory(sizeof(Common));
  const SharedMemory plain_memory(PlainStaged::bytes(W, most_count));
  Common& common = *common_memory.as<Common>();
  const auto file = Engine::make_file(lockstep::WorldSize{W});
  const auto safety_file = Engine::make_file(lockstep::WorldSize{W});
  const std::string address = Engine::address(file);
  const std::string safety_address = Engine::address(safety_file);

  run_ranks(W, deadline, [&](std::size_t rank) {
    Stand stand(common.track, rank, W);
    lockstep::ShmCommunicator<W> comm(lockstep::Rank{rank}, lockstep::WorldSize{W},
                                      Engine::open(address), std::chrono::milliseconds(60000));
    const std::span<float> shared = comm.template allocate<float>(most_count);
    std::vector<float> memory(most_count);
    std::vector<float> destination(most_count);
    const std::span<float> data = memory;
    PlainStaged peer(plain_memory.as<void>(), rank, W, most_count);
    const auto gloo_reduce = connect_gloo(folder.path(), rank, W, common.without_gloo, stand);

    std::vector<Contestant> contestants(lanes);
    contestants[arena] = {"lockstep", shared, repeat([&](std::size_t n) {
                            comm.all_reduce(shared.first(n), lockstep::Sum{});
                          })};
    contestants[staged] = {"lockstep, staged", data, repeat([&](std::size_t n) {
                             comm.all_reduce(data.first(n), lockstep::Sum{});
                           })};
    contestants[plain] = {"plain staged", data,
                          repeat([&](std::size_t n) { peer.all_reduce(data.first(n)); })};
    contestants[gloo] = {"Gloo", data};
    contestants[gloo].has_threads = true;
    if (gloo_reduce) {
      contestants[gloo].run = repeat([&](std::size_t n) { gloo_reduce(data.first(n)); });
    }
    contestants[copying] = {"memcpy", {}, repeat([&](std::size_t n) {
                              bench::copy(memory.data(), destination.data(), n);
                            })};

    for (std::size_t s = 0; s < sizes.size(); ++s) {
      const auto times = stand.race(contestants, sizes[s] / sizeof(float));
      if (rank != 0) continue;
      for (std::size_t lane = 0; lane < lanes; ++lane) rows[s][lane] = summary(times[lane]);
      print_row(W, sizes[s], rows[s]);
    }
    if constexpr (W == 2) {
      Safety<W> safety(safety_address, rank, 1_MiB);
      const auto times = stand.race({safety.checked(), safety.unchecked()}, 1_MiB / sizeof(float));
      if (rank == 0) {
        results.checked = summary(times[0]);
        results.unchecked = summary(times[1]);
      }
      stand.barrier();
    }
    stand.barrier();
  });
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc == 3 && argv[1] == std::string("mpi")) {
    run_mpi_rank(argv[2]);
    return 0;
  }
  const Clock::time_point deadline = Clock::now() + time_limit;
  const SharedMemory memory(sizeof(Results));
  Results& results = *memory.as<Results>();
  std::printf("all-reduce, sum of float, ranks as processes on %zu cores; times in us\n\n",
              cores());
  const OthersLoad others;
  print_heading();
  const auto wanted = [&](const char* ranks) {
    return argc == 1 || std::find(argv + 1, argv + argc, std::string(ranks)) != argv + argc;
  };
  if (wanted("2")) run_world<2>(results.rows[0], results, deadline);
  if (wanted("4")) run_world<4>(results.rows[1], results, deadline);
  if (wanted("8")) run_world<8>(results.rows[2], results, deadline);
  MpiResults through_mpi{};
  for (std::size_t w = 0; w < mpi_worlds.size(); ++w)
    if (wanted(std::to_string(mpi_worlds[w]).c_str()))
      through_mpi[w] = race_through_mpi(mpi_worlds[w]);
  print_mpi(through_mpi);
  report(results, through_mpi, LOCKSTEP_SOURCE_DIR "/build/bench/allreduce.json");
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench allreduce: %s\n", error.what());
  return 1;
}
