// SPDX-License-Identifier: Apache-2.0
// Threads inside hosts, NCCL between them, on GPUs; tests/gpu/nodes_run starts it on two nodes, a
// process on each: ddp_hierarchy --ranks N CHECK
#include "lockstep/nccl.cuh"

#include "gpu/ddp_checks.cuh"
#include "gpu/rank_cases.cuh"

namespace {

using namespace lockstep;
using namespace exercise;

/// Messages are left out: not every rank can send to every other.
void collectives(ThreadedNccl& comm) {
  every_operation<float>(comm, false);
#if LOCKSTEP_RUNS_ON_GPU
  every_operation<double>(comm, false);
  every_operation<Half>(comm, false);
  every_operation<BFloat16>(comm, false);
  every_operation<std::int16_t>(comm, false);
  every_operation<std::int64_t>(comm, false);
  every_operation<std::uint8_t>(comm, false);
#endif
  nan_wins<float>(comm);
  for (const bool on_host : {false, true}) {
    exercise::reductions<float>(comm, 0, on_host, Sum{});
    exercise::movements<float>(comm, 0, on_host, false);
  }
  constexpr std::size_t large = (3 << 20) + 5;
  exercise::reductions<float>(comm, large, false, Average{});
  exercise::movements<float>(comm, large, false, false);
}

/// Groups on both hosts, on one host, and of one rank of each host. (A group that is uneven over
/// hosts is NCCL's alone, which ranks that share a GPU cannot be in.)
void groups(ThreadedNccl& comm) {
  const std::size_t world = comm.world_size().value();
  std::vector<Rank> all;
  std::vector<Rank> first_host;
  for (std::size_t w = 0; w < world; ++w) all.emplace_back(w);
  for (std::size_t w = 0; w < world / 2; ++w) first_host.emplace_back(w);
  const std::vector<Rank> lasts{Rank{world / 2 - 1}, Rank{world - 1}};
  for (const std::vector<Rank>& members : {all, first_host, lasts}) {
    auto group = new_group(comm, members);
    if (!group) continue;
    every_operation<float>(*group, false);
    numbers_and_pieces(*group);
  }
  auto again = join_groups(comm, Grid<dynamic, dynamic>{comm.world_size(), world});
  numbers_and_pieces(again);
}

/// Calls that differ, of ranks of one process and of two.
void mismatch(ThreadedNccl& comm) {
  comm.set_timeout(std::chrono::seconds(30));
  const auto data = comm.allocate<float>(101);
  const Rank other{comm.world_size().value() - 1};
  const auto [error, seconds] = failure_of([&] {
    comm.all_reduce(data.first(comm.rank() == other ? 101 : 100), Sum{});
    for (const Clock::time_point begin = Clock::now(); seconds_since(begin) < 60;) comm.barrier();
  });
  print_failure(error, seconds);
  // It is not the time limit that ends it; beside other programs on the GPU all else is slow.
  exercise::require(seconds < 25, "it took " + std::to_string(seconds) + " s");
}

bool run_case(ThreadedNccl& comm, const std::string& name) {
  if (name == "collectives") {
    collectives(comm);
    numbers_and_pieces(comm);
  } else if (name == "groups") {
    groups(comm);
  } else if (name == "async") {
    sums_of_a_busy_stream(comm, 10'000, std::chrono::seconds(1));
  } else if (name == "patience") {
    patience(comm);
  } else if (name == "killed") {
    killed(comm, 100'000);
  } else if (name == "mismatch") {
    mismatch(comm);
    return true;  // the communicator is of no use any more
  } else {
    return false;
  }
  comm.barrier();
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (detail::visible_gpus() == 0) {
    std::puts("compiled and linked; not run: no CUDA device here");
    return 0;
  }
  const auto run = [](Session& session) {
    auto comm = make_threaded_nccl_communicator(session.membership(), session.store());
    const std::string name = session.arguments().size() > 1 ? session.arguments()[1] : "all";
    if (!run_case(comm, name)) {
      gpu_test::run_checks<LOCKSTEP_RUNS_ON_GPU>(comm, name);
    } else if (session.rank() == Rank{0}) {
      std::printf("ok %s, %zu ranks\n", name.c_str(), session.world().value());
    }
  };
  return launch_threads(argc, argv, run, dynamic, Processes::many);
}
