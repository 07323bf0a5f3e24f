// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/launch/launch.hpp"

#include <unistd.h>

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "launch/watchdog.hpp"
#include "lockstep/detail/launch/output.hpp"

using namespace lockstep;
using lockstep::detail::LineCutter;
using namespace std::chrono_literals;

BOOST_FIXTURE_TEST_SUITE(spawn_and_supervise, Watchdog)

BOOST_AUTO_TEST_CASE(threads_are_ranks_of_one_job) {
  std::atomic<std::size_t> sum = 0;
  std::set<std::string> jobs;
  std::mutex mutex;
  spawn<4>([&](const Membership& m, Store& store) {
    store.barrier("all", m.rank, m.world);
    sum += m.rank.value() + 10 * m.local_world;
    const std::lock_guard lock(mutex);
    jobs.insert(m.job);
  });
  BOOST_TEST(sum == 6u + 160u);
  BOOST_TEST(jobs.size() == 1u);
  BOOST_TEST(jobs.begin()->size() == 32u);
}

BOOST_AUTO_TEST_CASE(processes_are_ranks_of_one_job) {
  const pid_t parent = ::getpid();
  for (std::size_t ranks : {1, 2, 4}) {
    spawn(AsProcesses{}, ranks, [&](const Membership& m, Store& store) {
      detail::check(::getpid() != parent && ::getppid() == parent, "be a child");
      store.add("sum", static_cast<std::int64_t>(m.rank.value() + 1));
      store.barrier("all", m.rank, m.world);
      const auto n = static_cast<std::int64_t>(ranks);
      detail::check(store.add("sum", 0) == n * (n + 1) / 2, "count right");
    });
  }
}

BOOST_AUTO_TEST_CASE(what_a_thread_throws_first_is_thrown_and_frees_the_others) {
  const auto run = [] {
    spawn(AsThreads{}, 4, [](const Membership& m, Store& store) {
      if (m.rank == Rank{2}) throw std::runtime_error("no data");
      store.barrier("never", m.rank, m.world);
    });
  };
  expect_error(run, "rank 2, spawn: no data");
  try {
    run();
  } catch (const Error& error) {
    try {
      std::rethrow_if_nested(error);
      BOOST_ERROR("the original exception is not nested");
    } catch (const std::runtime_error& original) {
      BOOST_TEST(original.what() == "no data");
    }
  }
  expect_error(
      [] {
        spawn<2>([](const Membership& m, Store&) {
          if (m.rank == Rank{1}) throw Error("step", "nan", "look");
        });
      },
      "lockstep: rank 1, step: nan; look");
}

BOOST_AUTO_TEST_CASE(what_a_process_throws_first_is_thrown_and_ends_the_others) {
  expect_error(
      [] {
        spawn<4>(AsProcesses{}, [](const Membership& m, Store& store) {
          if (m.rank == Rank{2}) throw Error("step", "nan", "look");
          store.barrier("never", m.rank, m.world);
        });
      },
      "lockstep: rank 2, step: nan; look");
  expect_error(
      [] {
        spawn<3>(AsProcesses{}, [](const Membership& m, Store& store) {
          if (m.rank == Rank{1}) ::raise(SIGKILL);
          store.barrier("never", m.rank, m.world);
        });
      },
      "rank 1", "killed by signal 9 (Killed)");
  expect_error(
      [] {
        spawn<2>(AsProcesses{}, [](const Membership& m, Store& store) {
          if (m.rank == Rank{0}) ::_exit(7);
          store.barrier("never", m.rank, m.world);
        });
      },
      "rank 0", "exit status 7");
}

BOOST_AUTO_TEST_CASE(a_store_of_one_rank_that_times_out_names_the_other) {
  expect_error(
      [] {
        spawn<2>(AsProcesses{}, [](const Membership& m, Store& store) {
          if (m.rank == Rank{1}) {
            store.get("until rank 0 fails", 20000ms);
          } else {
            store.barrier("b", m.rank, m.world, 200ms);
          }
        });
      },
      "rank 0, barrier: rank 1 did not come to 'b' within 0.2 s");
}

BOOST_AUTO_TEST_CASE(lines_are_cut_kept_whole_and_never_grow_without_end) {
  std::vector<std::string> lines;
  const auto sink = [&](std::string_view line, bool) { lines.emplace_back(line); };
  LineCutter cutter;
  cutter.feed("one\ntw", sink);
  cutter.feed("o\n\nthr", sink);
  cutter.feed("ee", sink);
  BOOST_TEST((lines == std::vector<std::string>{"one", "two", ""}));
  cutter.finish(sink);
  cutter.finish(sink);
  BOOST_TEST((lines == std::vector<std::string>{"one", "two", "", "three"}));
  lines.clear();
  const std::string line(LineCutter::max_line, 'x');
  cutter.feed(line + line + "y\n", sink);
  BOOST_TEST((lines == std::vector<std::string>{line, line, "y"}));
}

BOOST_AUTO_TEST_SUITE_END()
