// SPDX-License-Identifier: Apache-2.0
// A backend of six functions passes every test of collectives.
#include <boost/test/unit_test.hpp>

#include "exercise.hpp"
#include "mismatch.hpp"
#include "toy_communicator.hpp"

using namespace ranks;

BOOST_AUTO_TEST_SUITE(comm_toy)

template <class F>
void run_toys(std::size_t world, const F& f) {
  expect_all_fine(run_threads<ToyRendezvous>(world, 20s, f));
}

BOOST_AUTO_TEST_CASE(every_operation_on_every_type_in_worlds_of_one_to_five) {
  for (const std::size_t world : {1, 2, 3, 4, 5}) {
    run_toys(world, [](auto& comm) {
      every_operation<double>(comm, 100);
      every_operation<float>(comm, 7);
      every_operation<Half>(comm, 33);
      every_operation<BFloat16>(comm, 9);
      every_operation<std::int8_t>(comm, 65);
      every_operation<std::int64_t>(comm, 1);
      every_operation<std::uint16_t>(comm, 0);
      every_operation<std::uint32_t>(comm, 130);
    });
  }
}

BOOST_AUTO_TEST_CASE(reductions_larger_than_the_scratch_memory_are_made_in_parts) {
  run_toys(3, [](auto& comm) {
    std::vector<float> data((5u << 20) / 3);
    std::vector<float> pieces(3 * data.size());
    reductions(comm, std::span(data), std::span(pieces), Average{});
  });
}

BOOST_AUTO_TEST_CASE(several_reductions_may_be_under_way) {
  run_toys(3, [](auto& comm) {
    several_under_way(comm, 5);
    many_under_way(comm);
  });
}

BOOST_AUTO_TEST_CASE(groups_of_a_topology_reduce_among_themselves) {
  run_toys(6, [](auto& comm) { groups_of_six(comm); });
}

BOOST_AUTO_TEST_CASE(single_numbers_truths_and_pieces_of_different_lengths_are_gathered) {
  for (const std::size_t world : {1, 2, 4}) {
    run_toys(world, [](auto& comm) { numbers_and_pieces(comm); });
  }
}

BOOST_AUTO_TEST_CASE(a_rank_that_waits_for_a_message_is_reported_by_its_own_call) {
  const Ends ends = run_threads<ToyRendezvous>(2, 200ms, [](auto& comm) {
    std::vector<float> data(5);
    if (comm.rank() == Rank{0}) comm.receive(data, Rank{1});
  });
  expect_words(ends, 1, {"rank 0, receive(5 float, from rank 1): waited 200 ms for rank 1"});
  const Ends collective = run_threads<ToyRendezvous>(2, 200ms, [](auto& comm) {
    std::vector<float> data(5);
    if (comm.rank() == Rank{1}) comm.all_reduce(data);
  });
  expect_words(collective, 0, {"rank 1, all_reduce(sum of 5 float): waited 200 ms for rank 0"});
}

BOOST_AUTO_TEST_CASE(strings_travel_whole) {
  run_toys(4, [](auto& comm) { strings_of_four(comm); });
}

BOOST_AUTO_TEST_CASE(calls_that_differ_are_told_apart) {
  expect_mismatches<ToyRendezvous>(As::threads);
}

BOOST_AUTO_TEST_CASE(a_rank_that_fails_ends_the_others_with_its_words) {
  const Ends ends = run_threads<ToyRendezvous>(3, 20s, [](auto& comm) {
    if (comm.rank() == Rank{1}) {
      comm.abort("out of luck");
      return;
    }
    comm.barrier();
  });
  expect_words(ends, 1, {"rank 1 failed: out of luck"});
}

BOOST_AUTO_TEST_CASE(a_rank_that_does_not_come_is_named_when_the_time_is_over) {
  const Ends ends = run_threads<ToyRendezvous>(2, 20s, [](auto& comm) {
    if (comm.rank() == Rank{0}) comm.monitored_barrier(100ms);
  });
  expect_words(ends, 1, {"waited 100 ms for rank 1"});
}

BOOST_AUTO_TEST_SUITE_END()
