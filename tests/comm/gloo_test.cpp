// SPDX-License-Identifier: Apache-2.0
// Backend<Gloo>: every collective against a plain reference, and every fault named by all ranks.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "exercise.hpp"
#include "failing_ranks.hpp"
#include "failing_threads.hpp"
#include "gloo_ranks.hpp"
#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/core/error.hpp"
#include "mismatch.hpp"
#include "repeat.hpp"

using namespace ranks;

static_assert(ArenaAllocating<GlooCommunicator<>> && AsyncReducing<GlooCommunicator<2>> &&
              Splitting<GlooCommunicator<>>);

BOOST_AUTO_TEST_SUITE(comm_gloo)

namespace {

using OverGloo = GlooCommunicator<>;
using Clock = std::chrono::steady_clock;

Ends run_gloo(std::size_t world, auto f, std::chrono::milliseconds timeout = 20s) {
  return run_processes<Sockets>(world, timeout, f);
}

/// Rank 0 ends without a word as soon as it has joined. The others get a processor when nobody else
/// wants it: mostly they are still joining when its connections end.
struct KilledAfterJoining : Sockets {
  using Sockets::Sockets;

  OverGloo join(Rank rank, WorldSize world, std::chrono::milliseconds timeout) const {
    const sched_param any{};
    if (rank != Rank{0}) ::sched_setscheduler(0, SCHED_IDLE, &any);
    OverGloo comm = Sockets::join(rank, world, timeout);
    if (rank == Rank{0}) raise(SIGKILL);
    return comm;
  }
};

/// Rank 1 can start `More` threads, and then no other.
template <int More>
struct ThreadsRunOut : Sockets {
  using Sockets::Sockets;

  OverGloo join(Rank rank, WorldSize world, std::chrono::milliseconds timeout) const {
    if (rank == Rank{1}) limit_.emplace(More);
    return Sockets::join(rank, world, timeout);
  }

 private:
  mutable std::optional<ThreadLimit> limit_;  // until the process ends
};

template <std::size_t... I>
void every_type(OverGloo& comm, std::size_t n, std::index_sequence<I...>) {
  (every_operation<std::tuple_element_t<I + 1, detail::ElementTypes>>(comm, n), ...);
}

}  // namespace

BOOST_AUTO_TEST_CASE(every_collective_type_operation_and_odd_size_is_exact) {
  for (const std::size_t world : {1, 2, 4}) {
    BOOST_TEST_CONTEXT("world " << world) {
      expect_all_fine(run_gloo(world, [](OverGloo& comm) {
        for (const std::size_t n : {0, 1, 7})
          every_type(comm, n, std::make_index_sequence<detail::element_kinds - 1>{});
      }));
    }
  }
}

BOOST_AUTO_TEST_CASE(sizes_beyond_a_message_are_exact) {
  for (const std::size_t world : {1, 2, 3, 4}) {
    expect_all_fine(run_gloo(world, [](OverGloo& comm) {
      every_operation<float>(comm, 4097);
      every_operation<std::int64_t>(comm, 513);
      every_operation<BFloat16>(comm, 2049);
      std::vector<float> data(6_MiB / sizeof(float) + 1);
      std::vector<float> pieces(data.size() * comm.world_size().value());
      reductions(comm, std::span<float>(data), std::span<float>(pieces), Sum{});
    }));
  }
}

// In one message, and in the halves of a ring. It takes 9 GB of memory and some minutes, most of
// them because tests are not optimised.
BOOST_AUTO_TEST_CASE(more_bytes_than_an_int_counts_are_exact) {
  if (repetitions(0, 1) == 0) return;
  const auto f = [](OverGloo& comm) {
    constexpr std::size_t count = (std::size_t{1} << 31) + 64;
    constexpr std::size_t marks[] = {0,          count / 2 - 1, count / 2,
                                     count - 65, count - 64,    count - 1};
    const std::size_t rank = comm.rank().value();
    std::vector<std::uint8_t> data(count, static_cast<std::uint8_t>(3 + rank));
    for (const std::size_t i : marks) data[i] = static_cast<std::uint8_t>(100 + rank);
    const auto expect = [&](std::uint8_t value, std::uint8_t marked) {
      const auto others = static_cast<std::size_t>(std::count(data.begin(), data.end(), value));
      require(others == count - std::size(marks), std::to_string(others) + " elements are right");
      for (const std::size_t i : marks) require(data[i] == marked, "element " + std::to_string(i));
    };
    comm.broadcast(std::span<std::uint8_t>(data), Rank{1});
    expect(4, 101);
    comm.all_reduce(std::span<std::uint8_t>(data), Sum{});
    expect(8, 202);
  };
  expect_all_fine(run_processes<Sockets>(2, 200s, f, 600s));
}

BOOST_AUTO_TEST_CASE(small_sums_are_in_rank_order) {
  expect_all_fine(run_gloo(4, [](OverGloo& comm) { sums_in_rank_order(comm, {5, 1000}); }));
}

BOOST_AUTO_TEST_CASE(sums_of_halves_are_rounded_once) {
  // 2048 + 1 is 2048 in half precision: rounded at every step, the ones are lost.
  expect_all_fine(run_gloo(4, [](OverGloo& comm) {
    const Half mine(comm.rank() == Rank{0} ? 2048.f : 1.f);
    std::vector<Half> data(9, mine);
    comm.all_reduce(data);
    for (Half x : data) require(static_cast<float>(x) == 2052.f, "all_reduce lost digits");
    data.assign(9, mine);
    comm.reduce(data, Rank{1});
    require(static_cast<float>(data[8]) == (comm.rank() == Rank{1} ? 2052.f : float(mine)),
            "reduce lost digits");
  }));
}

BOOST_AUTO_TEST_CASE(a_nan_on_one_rank_is_a_nan_on_all) {
  expect_all_fine(run_gloo(4, [](OverGloo& comm) {
    for (std::size_t culprit = 0; culprit < 4; ++culprit) {
      std::vector<float> data(40, static_cast<float>(comm.rank().value()));
      if (comm.rank() == Rank{culprit}) data[31] = std::numeric_limits<float>::quiet_NaN();
      std::vector<float> most = data;
      comm.all_reduce(data, Min{});
      comm.all_reduce(most, Max{});
      require(std::isnan(data[31]) && std::isnan(most[31]), "the NaN is hidden");
      require(data[30] == 0.f && most[30] == 3.f, "minimum and maximum");
    }
  }));
}

// Values whose sum depends on the order: whatever order it is, it is the same everywhere.
BOOST_AUTO_TEST_CASE(sums_are_the_same_bits_on_all_ranks_and_in_every_run) {
  expect_all_fine(run_gloo(4, [](OverGloo& comm) {
    for (const std::size_t n : {100, 100'003}) {
      std::vector<float> first;
      for (int round = 0; round < 3; ++round) {
        std::vector<float> data(n);
        for (std::size_t i = 0; i < n; ++i)
          data[i] = std::sin(static_cast<float>(i * 4 + comm.rank().value())) *
                    std::pow(10.f, static_cast<float>(i % 9));
        comm.all_reduce(data);
        std::vector<float> all(n * 4);
        comm.all_gather(data, all);
        require_same_of_all(all, data);
        if (first.empty()) first = data;
        require(first == data, "differs between runs");
      }
    }
  }));
}

BOOST_AUTO_TEST_CASE(several_reductions_may_be_under_way_and_be_awaited_in_any_order) {
  expect_all_fine(run_gloo(3, [](OverGloo& comm) {
    several_under_way(comm, 10);
    many_under_way(comm);
  }));
}

// Rank 0 stays away from the communicator until rank 1 has its result, which needs rank 0's share.
BOOST_AUTO_TEST_CASE(calls_go_on_while_the_rank_is_away) {
  const Common<std::atomic<int>> done;
  expect_all_fine(run_gloo(2, [&](OverGloo& comm) {
    for (int round = 1; round <= 5; ++round) {
      std::vector<float> data(100'000, 1.f);
      auto work = comm.all_reduce_async(data);
      while (comm.rank() == Rank{0} && *done < round) std::this_thread::sleep_for(1ms);
      work.wait();
      if (comm.rank() == Rank{1}) *done = round;
      require(data[99'999] == 2.f, "the sum is wrong");
    }
  }));
}

BOOST_AUTO_TEST_CASE(groups_of_a_topology_reduce_among_themselves) {
  expect_all_fine(run_gloo(6, [](OverGloo& comm) { groups_of_six(comm); }));
}

BOOST_AUTO_TEST_CASE(single_numbers_truths_and_pieces_of_different_lengths_are_gathered) {
  for (const std::size_t world : {1, 2, 3}) {
    expect_all_fine(run_gloo(world, [](OverGloo& comm) { numbers_and_pieces(comm); }));
  }
}

BOOST_AUTO_TEST_CASE(strings_travel_whole) {
  expect_all_fine(run_gloo(4, [](OverGloo& comm) { strings_of_four(comm); }));
}

BOOST_AUTO_TEST_CASE(ranks_may_be_threads) {
  expect_all_fine(run_threads<Sockets>(3, 20s, [](OverGloo& comm) {
    std::vector<int> sum{1};
    comm.all_reduce(sum);
    require(sum[0] == 3, "the sum is wrong");
  }));
}

BOOST_AUTO_TEST_CASE(calls_that_differ_are_errors_on_all_ranks_that_name_both) {
  for (int i = 0; i < repetitions(1, 10); ++i) expect_mismatches<Sockets>(As::processes);
}

BOOST_AUTO_TEST_CASE(groups_of_different_ranks_are_an_error) {
  expect_groups_that_differ_to_be_named<Sockets>();
}

BOOST_AUTO_TEST_CASE(messages_of_different_counts_are_an_error) {
  const Ends ends = run_gloo(2, [](OverGloo& comm) {
    std::vector<float> data(comm.rank() == Rank{0} ? 5 : 6);
    if (comm.rank() == Rank{0}) comm.send(data, Rank{1});
    if (comm.rank() == Rank{1}) comm.receive(data, Rank{0});
  });
  expect_words(ends, nobody,
               {"receive(6 float, from rank 0): rank 0 sends send(5 float, to rank 1)"});
}

BOOST_AUTO_TEST_CASE(wrong_arguments_are_errors_here_and_now) {
  expect_words(run_gloo(2,
                        [](OverGloo& comm) {
                          std::vector<float> data(4);
                          comm.broadcast(data, Rank{2});
                        }),
               nobody, {"root 2 is not in the world"});
  expect_words(run_gloo(2,
                        [](OverGloo& comm) {
                          std::vector<float> in(4);
                          std::vector<float> out(7);
                          comm.all_gather(in, out);
                        }),
               nobody, {"7 elements where 8 are needed"});
}

BOOST_AUTO_TEST_CASE(an_exception_on_one_rank_reaches_the_others) {
  for (int i = 0; i < repetitions(2, 20); ++i) expect_an_exception_to_reach_others<Sockets>();
}

BOOST_AUTO_TEST_CASE(a_rank_that_stops_on_request_tells_the_others_of_no_failure) {
  expect_a_stop_to_be_no_failure<Sockets>();
}

BOOST_AUTO_TEST_CASE(a_rank_that_gives_up_tells_why) {
  for (int i = 0; i < repetitions(2, 20); ++i) expect_an_abort_to_be_told<Sockets>();
}

BOOST_AUTO_TEST_CASE(a_rank_that_skips_a_collective_is_named) {
  for (int i = 0; i < repetitions(2, 20); ++i) expect_a_skipped_call_to_be_named<Sockets>();
}

// The ranks' time limit is longer than the watchdog's: who names the dead rank has seen that it is
// gone, and has not merely waited. It dies between calls and in the middle of one.
BOOST_AUTO_TEST_CASE(a_killed_rank_is_named_by_all_others_long_before_the_time_limit) {
  Chance chance;
  for (int i = 0; i < repetitions(6, 50); ++i) {
    const Rank victim{chance(4)};
    const bool in_a_call = i % 2 == 1;
    const std::chrono::microseconds moment{chance(60'000)};
    const int last = static_cast<int>(chance(20));
    const Ends ends = run_gloo(
        4,
        [&](OverGloo& comm) {
          std::vector<float> data(in_a_call ? 2'000'000 : 10'000);
          std::jthread killer;
          for (int k = 0;; ++k) {
            if (comm.rank() == victim && !in_a_call && k == last) raise(SIGKILL);
            if (comm.rank() == victim && in_a_call && k == 1) {
              killer = std::jthread([&] {
                std::this_thread::sleep_for(moment);
                raise(SIGKILL);
              });
            }
            comm.all_reduce(data);
          }
        },
        10min);
    const std::string name = "rank " + std::to_string(victim.value());
    expect_words(ends, victim.value(),
                 {name + " failed: its connection ended without a word",
                  in_a_call ? "sum of 2000000" : "sum of 10000 float"});
    BOOST_TEST(ends[victim.value()] == "signal 9");
  }
}

BOOST_AUTO_TEST_CASE(a_rank_killed_right_after_joining_is_named_by_all_others) {
  for (int i = 0; i < repetitions(3, 40); ++i) {
    const Ends ends = run_processes<KilledAfterJoining>(4, 20s, [](auto& comm) { comm.barrier(); });
    expect_words(ends, 0, {"barrier(): rank 0 failed: its connection ended without a word"});
  }
}

// They make no call that could fail: they close their connections, of which one is broken.
BOOST_AUTO_TEST_CASE(a_killed_rank_ends_no_other_by_a_signal) {
  for (int i = 0; i < repetitions(3, 40); ++i) {
    const Ends ends = run_processes<KilledAfterJoining>(4, 20s, [](auto&) {});
    BOOST_TEST(ends == (Ends{"signal 9", "", "", ""}), boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(a_thread_that_cannot_start_is_an_error_in_words_and_the_others_hear_of_it) {
  const auto reduce = [](OverGloo& comm) {
    std::vector<float> data(10);
    comm.all_reduce_async(data).wait();
  };
  Ends ends = run_processes<ThreadsRunOut<0>>(2, 500ms, reduce);
  BOOST_TEST(ends[1].find("Gloo's thread for sockets cannot be started: ") != std::string::npos,
             ends[1]);
  BOOST_TEST(ends[1].find("ulimit -u") != std::string::npos, ends[1]);
  BOOST_TEST(ends[0].find("rank 1") != std::string::npos, ends[0]);
  ends = run_processes<ThreadsRunOut<1>>(2, 20s, reduce);
  const std::string watch = "the thread that watches Gloo's calls cannot be started: ";
  BOOST_TEST(ends[1].find(watch) != std::string::npos, ends[1]);
  BOOST_TEST(ends[0].find("rank 1 failed: ") != std::string::npos, ends[0]);
  BOOST_TEST(ends[0].find(watch) != std::string::npos, ends[0]);
  ends = run_processes<ThreadsRunOut<2>>(2, 20s, reduce);
  BOOST_TEST(ends[1].find("makes asynchronous calls cannot be started") != std::string::npos,
             ends[1]);
  BOOST_TEST(ends[0].find("rank 1 failed: it ended with an exception") != std::string::npos,
             ends[0]);
  ends = run_processes<ThreadsRunOut<3>>(2, 20s, reduce);
  BOOST_TEST(ends == (Ends{"", ""}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_stopped_rank_is_named_within_a_second_of_the_time_limit) {
  for (int i = 0; i < repetitions(2, 10); ++i) {
    const bool in_a_call = i % 2 == 1;
    const Common<std::atomic<int>> noticed;
    const Common<std::atomic<long>> longest;  // in milliseconds
    const Ends ends = run_gloo(3, [&](OverGloo& comm) {
      std::vector<float> data(in_a_call ? 10'000'000 : 1000);
      if (comm.rank() == Rank{1}) {
        const pid_t me = getpid();
        if (fork() == 0) {  // stops it, and wakes it after the others have noticed
          prctl(PR_SET_PDEATHSIG, SIGKILL);
          if (in_a_call) std::this_thread::sleep_for(20ms);
          kill(me, SIGSTOP);
          while (*noticed < 2) std::this_thread::sleep_for(1ms);
          kill(me, SIGCONT);
          _exit(0);
        }
        if (!in_a_call) std::this_thread::sleep_for(100ms);
      }
      comm.set_timeout(700ms);
      auto begin = Clock::now();
      try {
        for (;; begin = Clock::now()) comm.all_reduce(data);
      } catch (const Error&) {
        if (comm.rank() != Rank{1}) {
          const auto took =
              std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
          *longest = std::max<long>(*longest, took.count());
        }
        ++*noticed;
        throw;
      }
    });
    expect_words(ends, 1, {"waited 700 ms for rank 1"});
    std::fprintf(stderr, "a stopped rank was named after %ld ms of 700\n", longest->load());
    BOOST_TEST(*longest < 3'000);  // a second, and as much again for a machine that is busy
  }
}

BOOST_AUTO_TEST_CASE(a_monitored_barrier_lists_all_who_are_missing) {
  const Common<std::atomic<bool>> over;
  const Ends ends = run_gloo(3, [&](OverGloo& comm) {
    comm.monitored_barrier(20s);  // nobody is missing
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
  BOOST_TEST(ends[0].find("waited 300 ms for ranks 1, 2") != std::string::npos, ends[0]);
}

BOOST_AUTO_TEST_CASE(a_rank_that_never_joins_is_named) {
  Sockets rendezvous(2);
  rendezvous.begin();
  BOOST_CHECK_EXCEPTION(
      rendezvous.join(Rank{0}, WorldSize{2}, 300ms), Error, [](const Error& error) {
        return std::string(error.what()).find("rank 1 did not come") != std::string::npos;
      });
}

BOOST_AUTO_TEST_CASE(an_interface_that_is_not_there_is_named_with_those_that_are) {
  Sockets rendezvous(1);
  rendezvous.begin();
  setenv("LOCKSTEP_INTERFACE", "no-such0", 1);
  BOOST_CHECK_EXCEPTION(
      rendezvous.join(Rank{0}, WorldSize{1}, 300ms), Error, [](const Error& error) {
        const std::string text = error.what();
        return text.find("'no-such0'") != std::string::npos && text.find("lo") != std::string::npos;
      });
  setenv("LOCKSTEP_INTERFACE", "lo", 1);
  BOOST_CHECK_NO_THROW(rendezvous.join(Rank{0}, WorldSize{1}, 300ms).barrier());
  unsetenv("LOCKSTEP_INTERFACE");
}

BOOST_AUTO_TEST_SUITE_END()
