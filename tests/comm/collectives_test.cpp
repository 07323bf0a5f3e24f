// SPDX-License-Identifier: Apache-2.0
// Sequences of collectives, several under way at once, groups and strings. Small enough to run
// under the address and the thread sanitizer as well.
#include <boost/test/unit_test.hpp>
#include <memory>
#include <random>
#include <vector>

#include "exercise.hpp"
#include "lockstep/comm/groups.hpp"
#include "lockstep/topology/grid.hpp"
#include "lockstep/topology/transposed.hpp"

using namespace ranks;

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
        for (int i = 0; i < 60; ++i) {
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
    expect_all_fine(run(as, 3, [](Shared& comm) {
      auto arena = comm.allocate<double>(30000);
      for (int round = 0; round < 20; ++round) {
        for (std::size_t i = 0; i < arena.size(); ++i)
          arena[i] = value<double>(comm.rank().value(), i);
        auto a = comm.all_reduce_async(arena.subspan(0, 10000), Sum{});
        auto b = comm.all_reduce_async(arena.subspan(10000, 5), Max{});
        auto c = comm.all_reduce_async(arena.subspan(10005, 19995), Average{});
        if (round % 3 == 0) c.wait();
        if (round % 3 == 1) b.wait();
        if (round % 5 == 0) comm.barrier();
        a.wait();
        b.wait();
        c.wait();
        for (std::size_t i = 0; i < arena.size(); ++i) {
          const double expected = i < 10000   ? reduced<double>(Sum{}, 3, i)
                                  : i < 10005 ? reduced<double>(Max{}, 3, i)
                                              : reduced<double>(Average{}, 3, i);
          require_equal(arena[i], expected, "asynchronous", "");
        }
      }
    }));
  }
}

BOOST_AUTO_TEST_CASE(more_calls_than_the_ring_holds_may_be_posted) {
  expect_all_fine(run(As::processes, 2, [](Shared& comm) {
    auto arena = comm.allocate<float>(64 * 2000);
    std::fill(arena.begin(), arena.end(), 1.f);
    using Work = decltype(comm.all_reduce_async(arena, Sum{}));
    std::vector<std::unique_ptr<Work>> works;
    for (std::size_t i = 0; i < 64; ++i) {
      works.emplace_back(new Work(comm.all_reduce_async(arena.subspan(i * 2000, 2000), Sum{})));
    }
    works.clear();
    for (float x : arena) require(x == 2.f, "a reduction was lost");
  }));
}

BOOST_AUTO_TEST_CASE(groups_of_a_topology_reduce_among_themselves) {
  for (const As as : {As::processes, As::threads}) {
    expect_all_fine(run(as, 6, [](Shared& comm) {
      const std::size_t me = comm.rank().value();
      auto row = join_groups(comm, Grid<6, 3>{});
      auto column = join_groups(comm, Transposed<Grid<6, 3>>{});
      std::vector<int> sum{static_cast<int>(me)};
      row.all_reduce(sum);
      require(sum[0] == (me < 3 ? 0 + 1 + 2 : 3 + 4 + 5), "row");
      sum = {static_cast<int>(me)};
      column.all_reduce(sum);
      require(sum[0] == static_cast<int>(2 * (me % 3) + 3), "column");
      require(column.rank() == Rank{me / 3}, "place in the column");
      auto some = new_group(comm, {Rank{4}, Rank{1}});
      require(some.has_value() == (me == 4 || me == 1), "membership");
      if (some) {
        require(some->rank() == Rank{me == 4 ? 0u : 1u}, "listed order");
        some->barrier();
      }
    }));
  }
}

BOOST_AUTO_TEST_CASE(strings_travel_whole) {
  expect_all_fine(run(As::processes, 4, [](Shared& comm) {
    const std::size_t me = comm.rank().value();
    std::string text = me == 2 ? std::string(5000, 'x') + "end" : "ignored";
    broadcast_object(comm, text, Rank{2});
    require(text == std::string(5000, 'x') + "end", "broadcast_object");
    const auto all = all_gather_objects(comm, std::string(me * 3000, static_cast<char>('a' + me)));
    for (std::size_t w = 0; w < 4; ++w) {
      require(all[w] == std::string(w * 3000, static_cast<char>('a' + w)), "all_gather_objects");
    }
    require(gather_objects(comm, "r", Rank{1}).size() == (me == 1 ? 4u : 0u), "gather_objects");
    const std::vector<std::string> given{"zero", "", "two", "three"};
    require(
        scatter_objects(comm, me == 3 ? given : std::vector<std::string>(), Rank{3}) == given[me],
        "scatter_objects");
  }));
}

BOOST_AUTO_TEST_SUITE_END()
