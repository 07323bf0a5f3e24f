// SPDX-License-Identifier: Apache-2.0
// The threads of DP's replicas: phases, failures, and what is left when they go.
#include <atomic>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "launch/watchdog.hpp"
#include "lockstep/detail/strategy/replica_workers.hpp"
#include "thread_count.hpp"

using namespace lockstep;

BOOST_FIXTURE_TEST_SUITE(replica_workers, Watchdog)

using namespace lockstep::detail;

namespace {

std::string message_of(ReplicaWorkers& workers, const auto&... phases) {
  try {
    workers.run(phases...);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

BOOST_AUTO_TEST_CASE(every_replica_has_a_thread_of_its_own_and_the_first_is_the_callers) {
  for (const std::size_t n : {1, 2, 5}) {
    ReplicaWorkers workers(n);
    std::vector<std::thread::id> first(n), again(n);
    workers.run([&](std::size_t i) { first[i] = std::this_thread::get_id(); });
    workers.run([&](std::size_t i) { again[i] = std::this_thread::get_id(); });
    BOOST_TEST((first == again));
    BOOST_TEST((first[0] == std::this_thread::get_id()));
    for (std::size_t i = 1; i < n; ++i) BOOST_TEST((first[i] != first[i - 1]));
  }
}

BOOST_AUTO_TEST_CASE(no_phase_begins_before_all_are_done_with_the_last) {
  ReplicaWorkers workers(4);
  for (int round = 0; round < 300; ++round) {
    std::vector<int> one(4), two(4);
    std::atomic<int> wrong{0};
    workers.run([&](std::size_t i) { one[i] = round; },
                [&](std::size_t i) {
                  for (const int value : one) wrong += value != round;
                  two[i] = round;
                },
                [&](std::size_t) {
                  for (const int value : two) wrong += value != round;
                });
    BOOST_TEST_REQUIRE(wrong == 0);
  }
}

BOOST_AUTO_TEST_CASE(in_turn_one_replica_after_the_other_is_called_on_its_thread) {
  ReplicaWorkers workers(4);
  std::vector<std::thread::id> threads(4);
  workers.run([&](std::size_t i) { threads[i] = std::this_thread::get_id(); });
  std::vector<std::size_t> order;  // nobody else writes to it meanwhile
  workers.run_in_turn([&](std::size_t i) {
    BOOST_TEST((threads[i] == std::this_thread::get_id()));
    order.push_back(i);
  });
  BOOST_TEST((order == std::vector<std::size_t>{0, 1, 2, 3}));
  const auto fail = [&](std::size_t i) {
    if (i == 2) throw std::runtime_error("not me");
    order.push_back(i);
  };
  BOOST_CHECK_THROW(workers.run_in_turn(fail), Error);
  BOOST_TEST((order == std::vector<std::size_t>{0, 1, 2, 3, 0, 1}));
}

BOOST_AUTO_TEST_CASE(the_first_failure_by_index_is_thrown_and_no_phase_follows) {
  ReplicaWorkers workers(4);
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> later{0};
    const auto fail = [&](std::size_t i) {
      if (i == 1) std::this_thread::yield();
      if (i == 1 || i == 3) throw std::runtime_error("no luck for " + std::to_string(i));
    };
    const auto next = [&](std::size_t) { ++later; };
    const std::string words = message_of(workers, fail, next);
    BOOST_TEST_REQUIRE(words.find("replica 1: no luck for 1;") != std::string::npos, words);
    BOOST_TEST_REQUIRE(later == 0);
    workers.run([&](std::size_t) { ++later; });  // and nobody holds it against them
    BOOST_TEST_REQUIRE(later == 4);
  }
}

BOOST_AUTO_TEST_CASE(whoever_only_suffers_from_another_is_not_to_blame) {
  ReplicaWorkers workers(3);
  const auto fail = [&](std::size_t i) {
    if (i == 2) throw Error("all_reduce", "out of wire", "buy some", Rank{2});
    throw Error("all_reduce", "rank 2 failed", "look there", Rank{i}).as_consequence();
  };
  const std::string words = message_of(workers, fail);
  BOOST_TEST(words == "lockstep: replica 2, all_reduce: out of wire; buy some");
}

BOOST_AUTO_TEST_CASE(what_was_thrown_is_nested_and_one_replica_throws_it_as_it_is) {
  ReplicaWorkers two(2);
  const auto fail = [](std::size_t) { throw std::out_of_range("far out"); };
  try {
    two.run(fail);
    BOOST_TEST(false);
  } catch (const Error& error) {
    BOOST_CHECK_THROW(std::rethrow_if_nested(error), std::out_of_range);
  }
  ReplicaWorkers one(1);
  BOOST_CHECK_THROW(one.run(fail), std::out_of_range);
  BOOST_CHECK_THROW(one.run([](std::size_t) { throw 7; }), int);
}

BOOST_AUTO_TEST_CASE(whoever_calls_its_own_crew_is_told) {
  ReplicaWorkers workers(2);
  const auto again = [&](std::size_t) { workers.run([](std::size_t) {}); };
  const std::string words = message_of(workers, again);
  BOOST_TEST(words.find("replica 0, DP: a replica called the job") != std::string::npos, words);
  workers.run([](std::size_t) {});
}

BOOST_AUTO_TEST_CASE(no_thread_is_left) {
  const std::size_t before = thread_count();
  {
    ReplicaWorkers workers(4);
    workers.run([](std::size_t) {});
    BOOST_TEST(thread_count() == before + 3);
  }
  BOOST_TEST(thread_count() == before);
  {
    const ReplicaWorkers unused(3);
  }
  BOOST_TEST(thread_count() == before);
}

BOOST_AUTO_TEST_SUITE_END()
