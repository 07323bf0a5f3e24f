// SPDX-License-Identifier: Apache-2.0
// What any backend does, through MPI; what ranks say of each other when one of them fails. mpirun
// starts this program (tests/mpi/run): all ranks run all cases.
#include <sys/mman.h>

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <limits>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "exercise.hpp"
#include "failing_ranks.hpp"
#include "mismatch.hpp"
#include "mpi_ranks.hpp"
#include "sequences.hpp"

using namespace ranks;

BOOST_AUTO_TEST_SUITE(comm_mpi)

namespace {

using OverMpi = MpiCommunicator<>;
using WithoutThread = UnderMpirun<Callers>;
using AnyOrder = UnderMpirun<HelperThread, MpiAnyOrder>;

Ends run_mpi(std::size_t world, auto f, std::chrono::milliseconds timeout = 20s) {
  return run_processes<UnderMpirun<>>(world, timeout, f);
}

template <class Rendezvous, class... Types>
void exercise(std::type_identity<std::tuple<Types...>>) {
  for (const std::size_t world : {1, 2, 3, 4}) {
    BOOST_TEST_CONTEXT("world " << world) {
      expect_all_fine(run_processes<Rendezvous>(world, 20s, [](auto& comm) {
        for (const std::size_t n : {0, 1, 7}) (every_operation<Types>(comm, n), ...);
      }));
    }
  }
}
template <class All>
struct Elements;
template <class... Types>
struct Elements<std::tuple<void, Types...>> : std::type_identity<std::tuple<Types...>> {};
constexpr std::type_identity<Elements<detail::ElementTypes>::type> all_elements;

}  // namespace

BOOST_AUTO_TEST_CASE(every_collective_type_operation_and_odd_size_is_exact) {
  exercise<UnderMpirun<>>(all_elements);
}
// Types make no difference to who advances calls.
BOOST_AUTO_TEST_CASE(also_without_a_thread) {
  exercise<WithoutThread>(std::type_identity<std::tuple<float, Half>>{});
}
BOOST_AUTO_TEST_CASE(also_by_the_reductions_of_mpi) { exercise<AnyOrder>(all_elements); }

BOOST_AUTO_TEST_CASE(sizes_of_several_parts_are_exact) {
  for (const std::size_t world : {1, 2, 3, 4}) {
    expect_all_fine(run_mpi(world, [](OverMpi& comm) {
      every_operation<float>(comm, 4097);
      every_operation<std::int64_t>(comm, 513);
      every_operation<BFloat16>(comm, 2049);
      std::vector<float> data(6_MiB / sizeof(float) + 1);
      std::vector<float> pieces(data.size() * comm.world_size().value());
      reductions(comm, std::span<float>(data), std::span<float>(pieces), Sum{});
    }));
  }
}

BOOST_AUTO_TEST_CASE(a_nan_on_any_rank_is_the_minimum_and_the_maximum) {
  const auto f = [](auto& comm) {
    for (std::size_t culprit = 0; culprit < 3; ++culprit) {
      std::vector<float> data(100, static_cast<float>(comm.rank().value()) + 1);
      if (comm.rank() == Rank{culprit}) data[31] = std::numeric_limits<float>::quiet_NaN();
      std::vector<float> most = data;
      comm.all_reduce(data, Min{});
      comm.all_reduce(most, Max{});
      require(std::isnan(data[31]) && std::isnan(most[31]), "the NaN is hidden");
      require(data[30] == 1.f && most[30] == 3.f, "minimum and maximum");
    }
  };
  expect_all_fine(run_processes<UnderMpirun<>>(3, 20s, f));
  expect_all_fine(run_processes<AnyOrder>(3, 20s, f));
}

BOOST_AUTO_TEST_CASE(sums_are_the_same_bits_on_all_ranks_and_in_every_run) {
  const auto f = [](auto& comm) {
    for (const std::size_t n : {100, 100'003}) {
      std::vector<float> first;
      for (int round = 0; round < 3; ++round) {
        std::vector<float> data = rough_values(comm.rank().value(), n);
        comm.all_reduce(data);
        std::vector<float> all(n * 4);
        comm.all_gather(data, all);
        require_same_of_all(all, data);
        if (first.empty()) first = data;
        require(first == data, "differs between runs");
      }
    }
  };
  expect_all_fine(run_processes<UnderMpirun<>>(4, 20s, f));
  expect_all_fine(run_processes<AnyOrder>(4, 20s, f));
}

BOOST_AUTO_TEST_CASE(sums_are_in_rank_order) {
  expect_all_fine(run_mpi(4, [](OverMpi& comm) { sums_in_rank_order(comm, {5, 1000, 300'001}); }));
}

BOOST_AUTO_TEST_CASE(several_reductions_may_be_under_way_without_a_thread) {
  expect_all_fine(run_processes<WithoutThread>(3, 20s, [](auto& comm) {
    several_under_way(comm, 10);
    many_under_way(comm);
  }));
}

BOOST_AUTO_TEST_CASE(groups_of_a_topology_reduce_among_themselves) {
  expect_all_fine(run_mpi(6, [](OverMpi& comm) { groups_of_six(comm); }));
}

BOOST_AUTO_TEST_CASE(single_numbers_truths_and_pieces_of_different_lengths_are_gathered) {
  for (const std::size_t world : {1, 2, 3})
    expect_all_fine(run_mpi(world, [](OverMpi& comm) { numbers_and_pieces(comm); }));
}

BOOST_AUTO_TEST_CASE(strings_travel_whole) {
  expect_all_fine(run_mpi(4, [](OverMpi& comm) { strings_of_four(comm); }));
}

BOOST_AUTO_TEST_CASE(random_sequences_of_calls_are_what_a_plain_model_says) {
  random_sequences<UnderMpirun<>>(As::processes, 40, 400);
  random_sequences<WithoutThread>(As::processes, 20, 200);
}

BOOST_AUTO_TEST_CASE(calls_that_differ_are_errors_on_all_ranks_that_name_both) {
  expect_mismatches<UnderMpirun<>>(As::processes);
  expect_mismatches<WithoutThread>(As::processes);
}

BOOST_AUTO_TEST_CASE(groups_of_different_ranks_are_an_error) {
  expect_groups_that_differ_to_be_named<UnderMpirun<>>();
}

BOOST_AUTO_TEST_CASE(messages_of_different_counts_are_an_error) {
  const Ends ends = run_mpi(2, [](OverMpi& comm) {
    std::vector<float> data(comm.rank() == Rank{0} ? 5 : 6);
    if (comm.rank() == Rank{0}) comm.send(data, Rank{1});
    if (comm.rank() == Rank{1}) comm.receive(data, Rank{0});
    comm.barrier();
  });
  expect_words(ends, nobody,
               {"receive(6 float, from rank 0): rank 0 sends send(5 float, to rank 1)"});
}

BOOST_AUTO_TEST_CASE(an_exception_on_one_rank_reaches_the_others) {
  expect_an_exception_to_reach_others<UnderMpirun<>>();
}

BOOST_AUTO_TEST_CASE(a_rank_that_stops_on_request_tells_the_others_of_no_failure) {
  expect_a_stop_to_be_no_failure<UnderMpirun<>>();
}

BOOST_AUTO_TEST_CASE(a_rank_that_gives_up_tells_why) {
  expect_an_abort_to_be_told<UnderMpirun<>>();
}

BOOST_AUTO_TEST_CASE(a_rank_that_skips_a_collective_is_named) {
  expect_a_skipped_call_to_be_named<UnderMpirun<>>();
}

BOOST_AUTO_TEST_SUITE_END()

// A rank that has not come has agreed on nothing, and once it comes its call finds the others gone:
// MPI keeps its memory, and this process makes no call any more. So each of these cases has a run
// of its own.
BOOST_AUTO_TEST_SUITE(comm_mpi_alone)

using namespace comm_mpi;

BOOST_AUTO_TEST_CASE(a_rank_that_does_not_come_is_named_when_the_time_is_over) {
  const auto begin = std::chrono::steady_clock::now();
  const Ends ends = run_mpi(
      3,
      [](OverMpi& comm) {
        if (comm.rank() == Rank{2}) std::this_thread::sleep_for(3s);
        std::vector<float> data(10);
        comm.all_reduce(data);
      },
      700ms);
  expect_words(ends, 2, {"rank 2"});
  BOOST_TEST((ends[0].find("waited 700 ms for rank 2") != std::string::npos), ends[0]);
  BOOST_TEST(!ends[2].empty());
  BOOST_TEST((std::chrono::steady_clock::now() - begin < 10s));
}

BOOST_AUTO_TEST_CASE(a_monitored_barrier_lists_all_who_are_missing) {
  const Ends ends = run_mpi(3, [](OverMpi& comm) {
    comm.monitored_barrier(20s);  // nobody is missing
    if (comm.rank() == Rank{0}) comm.monitored_barrier(300ms);
    std::this_thread::sleep_for(1500ms);
  });
  BOOST_TEST(ends[0].find("waited 300 ms for ranks 1, 2") != std::string::npos, ends[0]);
}

BOOST_AUTO_TEST_SUITE_END()
