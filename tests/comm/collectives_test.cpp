// SPDX-License-Identifier: Apache-2.0
// Sequences of collectives, several under way at once, groups and strings. Small enough to run
// under the address and the thread sanitizer as well.
#include <boost/test/unit_test.hpp>
#include <random>
#include <vector>

#include "exercise.hpp"
#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/comm/loopback.hpp"

using namespace ranks;

// What each communicator can do. Not beside them: it would instantiate their members in every
// program.
static_assert(ArenaAllocating<ShmCommunicator<>> && AsyncReducing<ShmCommunicator<2>>);
static_assert(Splitting<ShmCommunicator<>>);
static_assert(AsyncReducing<ShmCommunicator<dynamic, HelperThread>>);
static_assert(ArenaAllocating<LoopbackCommunicator> && AsyncReducing<LoopbackCommunicator> &&
              Splitting<LoopbackCommunicator>);

BOOST_AUTO_TEST_SUITE(comm_collectives)

BOOST_AUTO_TEST_CASE(random_sequences_of_collectives_keep_in_step) {
  for (const std::size_t world : {2, 3, 4, 8}) {
    for (unsigned seed = 1; seed <= 3; ++seed) {
      expect_all_fine(run(seed == 3 ? As::threads : As::processes, world, [seed](Shared& comm) {
        std::mt19937 random(seed);  // the same on all ranks
        auto arena = comm.allocate<float>(9000);
        auto arena_pieces = comm.allocate<float>(9000 * comm.world_size().value());
        std::vector<float> own(9000);
        std::vector<float> own_pieces(arena_pieces.size());
        for (int i = 0; i < 30; ++i) {
          const std::size_t n = random() % 2 == 0 ? random() % 40 : random() % 9000;
          const bool in_arena = random() % 2 == 0;
          const auto data = (in_arena ? arena : std::span<float>(own)).first(n);
          const auto pieces = (in_arena ? arena_pieces : std::span<float>(own_pieces))
                                  .first(n * comm.world_size().value());
          switch (random() % 4) {
            case 0:
              reductions(comm, data, pieces, Sum{});
              break;
            case 1:
              reductions(comm, data, pieces, Max{});
              break;
            case 2:
              movements(comm, data, pieces);
              break;
            default:
              comm.barrier();
          }
        }
      }));
    }
  }
}

BOOST_AUTO_TEST_CASE(several_reductions_may_be_under_way_and_be_awaited_in_any_order) {
  for (const As as : {As::processes, As::threads}) {
    expect_all_fine(run(as, 3, [](Shared& comm) { several_under_way(comm, 20); }));
  }
}

BOOST_AUTO_TEST_CASE(more_calls_than_the_ring_holds_may_be_posted) {
  expect_all_fine(run(As::processes, 2, [](Shared& comm) { many_under_way(comm); }));
}

BOOST_AUTO_TEST_CASE(groups_of_a_topology_reduce_among_themselves) {
  for (const As as : {As::processes, As::threads}) {
    expect_all_fine(run(as, 6, [](Shared& comm) { groups_of_six(comm); }));
  }
}

BOOST_AUTO_TEST_CASE(single_numbers_truths_and_pieces_of_different_lengths_are_gathered) {
  for (const As as : {As::processes, As::threads}) {
    for (const std::size_t world : {1, 2, 3, 4}) {
      expect_all_fine(run(as, world, [](Shared& comm) { numbers_and_pieces(comm); }));
    }
  }
}

BOOST_AUTO_TEST_CASE(too_little_room_for_all_pieces_is_an_error_on_all_ranks) {
  expect_words(run(As::processes, 3,
                   [](Shared& comm) {
                     const std::vector<float> mine(comm.rank().value() + 1);
                     std::vector<float> out(comm.rank() == Rank{1} ? 5 : 6);
                     comm.all_gather_variable(mine, out);
                   }),
               nobody,
               {"all_gather_variable(float): rank 1 has room for 5 elements, and all ranks "
                "bring 6"});
}

BOOST_AUTO_TEST_CASE(strings_travel_whole) {
  expect_all_fine(run(As::processes, 4, [](Shared& comm) { strings_of_four(comm); }));
}

BOOST_AUTO_TEST_SUITE_END()
