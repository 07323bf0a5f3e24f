// SPDX-License-Identifier: Apache-2.0
// Ranks that die, stop or never come are named by all others, and leave nothing behind.
#include <algorithm>
#include <array>
#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "exercise.hpp"
#include "repeat.hpp"

using namespace ranks;

BOOST_AUTO_TEST_SUITE(comm_deaths)

namespace {

using Clock = std::chrono::steady_clock;

/// Those of the library by their names: other suites and MPI have files there as well.
std::size_t entries_in_dev_shm() {
  std::size_t n = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
    if (entry.path().filename().string().find("lockstep") != std::string::npos) ++n;
  return n;
}

/// Some sums, right or not.
void work(Shared& comm) {
  auto arena = comm.allocate<float>(50000);
  for (int k = 0; k < 5; ++k) {
    std::fill(arena.begin(), arena.end(), 1.f);
    comm.all_reduce(arena);
    require(arena.back() == static_cast<float>(comm.world_size().value()), "the sum is wrong");
  }
}

}  // namespace

// The ranks' time limit is longer than the watchdog's: who names the dead rank has seen that it is
// gone, and has not merely waited.
BOOST_AUTO_TEST_CASE(a_killed_rank_is_named_by_all_others_long_before_the_time_limit) {
  struct Times {
    Clock::time_point killed;
    std::array<Clock::time_point, 4> noticed;
  };
  Chance chance;
  std::vector<double> latencies;  // in milliseconds
  for (int i = 0; i < repetitions(5, 50); ++i) {
    const Rank victim{chance(4)};
    const int last = static_cast<int>(chance(100));
    const Common<Times> times;
    const Ends ends = run_processes(4, 10min, [&](Shared& comm) {
      auto arena = comm.allocate<float>(100000);
      try {
        for (int k = 0;; ++k) {
          if (k == last && comm.rank() == victim) {
            times->killed = Clock::now();
            raise(SIGKILL);
          }
          comm.all_reduce(arena);
        }
      } catch (const Error&) {
        times->noticed[comm.rank().value()] = Clock::now();
        throw;
      }
    });
    const std::string name = "rank " + std::to_string(victim.value());
    expect_words(ends, victim.value(), {name + "'s process ended", "sum of 100000 float"});
    BOOST_TEST(ends[victim.value()] == "signal 9");
    latencies.push_back(
        std::chrono::duration<double, std::milli>(
            *std::max_element(times->noticed.begin(), times->noticed.end()) - times->killed)
            .count());
  }
  std::sort(latencies.begin(), latencies.end());
  std::fprintf(stderr, "a killed rank was noticed by all after %.0f ms, at most %.0f\n",
               latencies[latencies.size() / 2], latencies.back());
}

BOOST_AUTO_TEST_CASE(a_stopped_rank_is_named_at_the_time_limit) {
  for (int i = 0; i < repetitions(2, 10); ++i) {
    const Common<std::atomic<int>> noticed;
    const Ends ends = run_processes(3, 60s, [&](Shared& comm) {
      if (comm.rank() == Rank{1}) {
        const pid_t me = getpid();
        if (fork() == 0) {  // the test ends when somebody wakes it, after the others have noticed
          prctl(PR_SET_PDEATHSIG, SIGKILL);
          while (*noticed < 2) std::this_thread::sleep_for(1ms);
          kill(me, SIGCONT);
          _exit(0);
        }
        raise(SIGSTOP);
      }
      comm.set_timeout(300ms);
      try {
        comm.barrier();
      } catch (const Error&) {
        ++*noticed;
        throw;
      }
    });
    expect_words(ends, 1, {"waited 300 ms for rank 1 (made 1 of 2 calls)"});
  }
}

BOOST_AUTO_TEST_CASE(a_rank_that_never_joins_is_named_too) {
  for (int i = 0; i < repetitions(2, 10); ++i) {
    const detail::Descriptor file = detail::shm::Engine::make_file(WorldSize{2});
    BOOST_CHECK_EXCEPTION(
        Shared(Rank{0}, WorldSize{2}, detail::shm::Engine::open(detail::shm::Engine::address(file)),
               300ms),
        Error, [](const Error& error) {
          return std::string(error.what()).find("rank 1 (never joined)") != std::string::npos;
        });
  }
}

BOOST_AUTO_TEST_CASE(a_monitored_barrier_lists_all_who_are_missing) {
  for (int i = 0; i < repetitions(2, 10); ++i) {
    const Common<std::atomic<bool>> over;
    const Ends ends = run_processes(3, 60s, [&](Shared& comm) {
      comm.monitored_barrier(60s);  // nobody is missing
      if (comm.rank() == Rank{0}) {
        try {
          comm.monitored_barrier(300ms);
        } catch (const Error&) {
          *over = true;
          throw;
        }
      }
      while (!*over) std::this_thread::sleep_for(1ms);
    });
    for (const char* const name : {"rank 1 (made 2 of 3 calls)", "rank 2 (made 2 of 3 calls)"})
      BOOST_TEST(ends[0].find(name) != std::string::npos, ends[0]);
  }
}

BOOST_AUTO_TEST_CASE(after_all_ranks_are_killed_nothing_is_left_and_the_next_run_starts) {
  Chance chance;
  const std::size_t before = entries_in_dev_shm();
  for (int i = 0; i < repetitions(10, 50); ++i) {
    // While they join, allocate or reduce. Repeated with the same seed, it is the same moment only
    // as far as the scheduler allows.
    const std::chrono::microseconds moment{chance(30'000)};
    run_processes(
        3, 10min,
        [](Shared& comm) {
          while (true) work(comm);
        },
        moment);
    expect_all_fine(run(As::processes, 3, work));
  }
  BOOST_TEST(entries_in_dev_shm() == before);
}

BOOST_AUTO_TEST_SUITE_END()
