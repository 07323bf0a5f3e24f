// SPDX-License-Identifier: Apache-2.0
// The thread that advances MPI's calls, beside the rank's own calls. mpirun starts this program
// (tests/mpi/run), which is also compiled with the thread sanitizer.
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "exercise.hpp"
#include "failing_ranks.hpp"
#include "mpi_ranks.hpp"

using namespace ranks;

BOOST_AUTO_TEST_SUITE(comm_mpi_thread)

namespace {

using OverMpi = MpiCommunicator<>;

/// As many ranks as mpirun has started.
Ends run_all(auto f) {
  over_mpi::Process::get();
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  return run_processes<UnderMpirun<>>(static_cast<std::size_t>(ranks), 20s, f);
}

}  // namespace

BOOST_AUTO_TEST_CASE(several_reductions_may_be_under_way_and_be_awaited_in_any_order) {
  expect_all_fine(run_all([](OverMpi& comm) {
    several_under_way(comm, 10);
    many_under_way(comm);
  }));
}

// A rank stays away from the communicator until the other has its result, which needs its share.
BOOST_AUTO_TEST_CASE(calls_go_on_while_the_rank_is_away) {
  expect_all_fine(run_processes<UnderMpirun<>>(2, 20s, [](OverMpi& comm) {
    for (int round = 1; round <= 5; ++round) {
      std::vector<float> data(100'000, 1.f);
      auto work = comm.all_reduce_async(data);
      if (comm.rank() == Rank{0}) {
        const auto begin = std::chrono::steady_clock::now();
        char word = 0;  // by a message of the program's own: the lock is this communicator's
        MPI_Request request = MPI_REQUEST_NULL;
        int has_come = 0;
        auto& mutex = over_mpi::Process::get().mutex();
        {
          const std::lock_guard lock(mutex);
          MPI_Irecv(&word, 1, MPI_CHAR, 1, 5, MPI_COMM_WORLD, &request);
        }
        while (has_come == 0) {
          std::this_thread::sleep_for(1ms);
          const std::lock_guard lock(mutex);
          MPI_Test(&request, &has_come, MPI_STATUS_IGNORE);
          require(std::chrono::steady_clock::now() - begin < 10s, "rank 1 has no result");
        }
      }
      work.wait();
      if (comm.rank() == Rank{1}) {
        const std::lock_guard lock(over_mpi::Process::get().mutex());
        MPI_Send("x", 1, MPI_CHAR, 0, 5, MPI_COMM_WORLD);
      }
      require(data[99'999] == 2.f, "the sum is wrong");
    }
  }));
}

// Each has a thread of its own.
BOOST_AUTO_TEST_CASE(two_communicators_of_a_process_work_side_by_side) {
  expect_all_fine(run_all([](OverMpi& comm) {
    const std::size_t world = comm.world_size().value();
    OverMpi other = join_groups(comm, Grid<dynamic, dynamic>{comm.world_size(), world});
    for (int round = 0; round < 50; ++round) {
      std::vector<float> first(3'000, 1.f);
      std::vector<float> second(3'000, 2.f);
      auto a = comm.all_reduce_async(first);
      auto b = other.all_reduce_async(second);
      b.wait();
      a.wait();
      require(first.back() == static_cast<float>(world), "the first sum is wrong");
      require(second.back() == static_cast<float>(2 * world), "the second sum is wrong");
    }
  }));
}

BOOST_AUTO_TEST_CASE(an_abort_ends_calls_in_flight) {
  const Ends ends = run_all([](OverMpi& comm) {
    std::vector<float> first(1000), second(1000);
    auto a = comm.all_reduce_async(first);
    if (comm.rank() == Rank{1}) return comm.abort("the disk is full");
    auto b = comm.all_reduce_async(second);
    a.wait();
    b.wait();
  });
  expect_words(ends, 1, {"rank 1 failed: the disk is full"});
}

BOOST_AUTO_TEST_SUITE_END()
