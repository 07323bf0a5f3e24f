// SPDX-License-Identifier: Apache-2.0
// A job's groups of ranks: rows and columns of a topology, made once, for every rank.
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/detail/topology/grid.hpp"
#include "lockstep/detail/topology/groups.hpp"
#include "train/sheet.hpp"

BOOST_AUTO_TEST_SUITE(job_groups)

namespace {

using namespace train;
using namespace std::chrono_literals;

// A grid whose world is the job's is as static as the job.
static_assert(std::is_same_v<Groups<Grid<dynamic, 2>>::in_world<6>, Grid<6, 2>>);
static_assert(std::is_same_v<Groups<Grid<dynamic, 2>>::in_world<dynamic>, Grid<dynamic, 2>>);
static_assert(Groups<Grid<6, 3>>::fits<6> && Groups<Grid<6, 3>>::fits<dynamic>);
static_assert(!Groups<Grid<6, 3>>::fits<3> && !Groups<Grid<dynamic, 4>>::fits<6>);
static_assert(Groups<>::fits<5>);
// The topology that lists its groups is what it was, and can be a job's too.
static_assert(Topology<Groups<World<4>, Group<0, 3>, Group<2, 1>>>);
static_assert(Groups<Groups<World<3>, Group<0, 2>, Group<1>>>::fits<3>);

template <class T>
std::uint64_t fingerprint() {
  detail::Hash hash;
  T::fingerprint(hash);
  return hash.value();
}

/// Sums in both directions, of numbers that tell ranks apart.
void check_sums(auto& ddp, std::size_t me, std::size_t world, std::size_t each) {
  const auto number = [](std::size_t rank) { return std::size_t{1} << rank; };
  std::size_t row = 0;
  std::size_t column = 0;
  for (std::size_t r = 0; r != world; ++r) {
    if (r / each == me / each) row += number(r);
    if (r % each == me % each) column += number(r);
  }
  require(ddp.group().world_size().value() == each, "the size of a group");
  require(ddp.across().world_size().value() == world / each, "the size across groups");
  require(ddp.group().rank().value() == me % each, "the rank in the group");
  require(ddp.across().rank().value() == me / each, "the rank across groups");
  require(ddp.group().all_reduce(number(me)) == row, "the sum in the group");
  require(ddp.across().all_reduce(number(me)) == column, "the sum across groups");
}

}  // namespace

BOOST_AUTO_TEST_CASE(rows_and_columns_of_a_grid_are_a_jobs_communicators) {
  for (const std::size_t world : {2u, 4u, 6u}) {
    all_well(world, [&](Shared& comm) {
      DistributedDataParallel<Sheet<>, Groups<Grid<dynamic, 2>>> ddp(comm);
      static_assert(std::is_same_v<decltype(ddp.group()), ShmCommunicator<2>&>);
      for (int s = 0; s != 2; ++s) {
        check_sums(ddp, comm.rank().value(), world, 2);
        ddp.step(Entry{});  // steps go on beside them
      }
    });
  }
}

BOOST_AUTO_TEST_CASE(a_world_that_does_not_fit_is_an_error_in_words) {
  all_say(
      ranks::run_processes(3, 20s,
                           [](Shared& comm) {
                             DistributedDataParallel<Sheet<>, Groups<Grid<dynamic, 2>>> ddp(comm);
                           }),
      "a world of 3 does not divide into groups of 2");
  all_say(
      ranks::run_processes(
          2, 20s, [](Shared& comm) { const detail::JobGroups<Grid<4, 2>, Shared> groups(comm); }),
      "the topology is for 4 ranks and the communicator has 2");
}

BOOST_AUTO_TEST_CASE(any_topology_divides_a_job) {
  all_well(4, [](Shared& comm) {
    detail::JobGroups<Transposed<Grid<4, 2>>, Shared> columns(comm);
    require(columns.group().all_reduce(comm.rank().value()) == 2 + 2 * (comm.rank().value() % 2),
            "the groups [0 2] [1 3]");
    require(columns.across().all_reduce(1) == 2, "and [0 1] [2 3]");
    detail::JobGroups<Groups<World<4>, Group<3, 0, 2>, Group<1>>, Shared> listed(comm);
    require(listed.group().all_reduce(1) == (comm.rank() == Rank{1} ? 1 : 3), "listed groups");
  });
}

BOOST_AUTO_TEST_CASE(a_failing_step_ends_the_calls_of_groups) {
  all_say(
      ranks::run_processes(4, 20s,
                           [](Shared& comm) {
                             DistributedDataParallel<Sheet<>, Groups<Grid<dynamic, 2>>> ddp(comm);
                             Entry entry;
                             if (comm.rank() == Rank{3}) entry.trouble = Entry::Trouble::in_forward;
                             if (comm.rank() == Rank{2}) ddp.group().barrier();
                             if (comm.rank() == Rank{1}) ddp.across().barrier();
                             ddp.step(entry);
                           }),
      "forward ran out of luck");
}

BOOST_AUTO_TEST_CASE(jobs_with_other_groups_have_other_fingerprints) {
  BOOST_TEST(fingerprint<Groups<>>() != (fingerprint<Groups<Grid<4, 2>>>()));
  BOOST_TEST((fingerprint<Groups<Grid<4, 2>>>()) != (fingerprint<Groups<Grid<4, 4>>>()));
  BOOST_TEST((fingerprint<Groups<Grid<dynamic, 2>>>()) !=
             (fingerprint<Groups<Grid<dynamic, 4>>>()));
  BOOST_TEST((fingerprint<Groups<Grid<4, 2>>>()) !=
             (fingerprint<Groups<Transposed<Grid<4, 2>>>>()));
}

BOOST_AUTO_TEST_SUITE_END()
