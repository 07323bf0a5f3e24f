// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/topology/topology.hpp"

#include <boost/test/unit_test.hpp>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "lockstep/detail/topology/grid.hpp"
#include "lockstep/detail/topology/groups.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(topology)

namespace {

/// `[0 1 2] [3 4 5]`, as the documentation writes topologies.
template <class T>
std::string text(const T& topology) {
  std::string out;
  for (std::size_t g = 0; g < topology.group_world_size(); ++g) {
    out += g == 0 ? "[" : " [";
    bool first = true;
    for (Rank rank : topology.members(GroupRank{g})) {
      out += (first ? "" : " ") + std::to_string(rank.value());
      first = false;
    }
    out += "]";
  }
  return out;
}

/// What the concept promises: every rank once, and `member` undoes `group_rank`.
template <class T>
void check_topology(const T& topology) {
  const std::size_t world = topology.world_size().value();
  std::set<std::size_t> seen;
  for (std::size_t r = 0; r < world; ++r) {
    const Rank rank{r};
    const GroupRank group = topology.group_rank(rank);
    const LocalGroupRank place = topology.local_group_rank(rank);
    BOOST_TEST_REQUIRE(group.value() < topology.group_world_size());
    BOOST_TEST_REQUIRE(place.value() < topology.group_size(group));
    BOOST_TEST_REQUIRE((topology.member(group, place) == rank));
    BOOST_TEST_REQUIRE((topology.leader(rank) == topology.members(group)[0]));
    std::size_t lowest = world;
    for (Rank member : topology.members(group)) {
      lowest = std::min(lowest, member.value());
      BOOST_TEST_REQUIRE((topology.group_rank(member) == group));
    }
    BOOST_TEST_REQUIRE(topology.group_rank_base(rank).value() == lowest);
    BOOST_TEST_REQUIRE(topology.is_leader(rank) == (place == LocalGroupRank{0}));
  }
  std::size_t members = 0;
  for (std::size_t g = 0; g < topology.group_world_size(); ++g) {
    for (Rank rank : topology.members(GroupRank{g})) seen.insert(rank.value());
    members += topology.group_size(GroupRank{g});
  }
  BOOST_TEST_REQUIRE(seen.size() == world);
  BOOST_TEST_REQUIRE(members == world);
}

void expect_error(auto make, const std::string& problem) {
  BOOST_CHECK_EXCEPTION(make(), Error, [&](const Error& error) {
    BOOST_TEST(error.problem() == problem);
    return !error.advice().empty();
  });
}

}  // namespace

BOOST_AUTO_TEST_CASE(grids_and_their_transposes_are_constants) {
  using G = Grid<6, 3>;
  using T = Transposed<G>;
  BOOST_TEST(text(G{}) == "[0 1 2] [3 4 5]");
  BOOST_TEST(text(T{}) == "[0 3] [1 4] [2 5]");
  static_assert(std::is_empty_v<G> && std::is_empty_v<T>);
  static_assert(std::is_same_v<Transposed<T>, G>);
  static_assert(G{}.group_size() == 3 && G{}.group_world_size() == 2);
  static_assert(G{}.group_rank(Rank{4}) == GroupRank{1});
  static_assert(G{}.local_group_rank(Rank{4}) == LocalGroupRank{1});
  static_assert(G{}.group_rank_base(Rank{4}) == Rank{3} && G{}.leader(Rank{5}) == Rank{3});
  static_assert(T{}.group_rank_base(Rank{4}) == Rank{1} && T{}.leader(Rank{4}) == Rank{1});
  static_assert(T{}.group_size() == 2 && T{}.group_world_size() == 3);
}

BOOST_AUTO_TEST_CASE(a_world_is_one_group) {
  BOOST_TEST(text(World<3>{}) == "[0 1 2]");
  BOOST_TEST(text(World<dynamic>{WorldSize{2}}) == "[0 1]");
  BOOST_TEST(text(Transposed<World<3>>{}) == "[0] [1] [2]");
  static_assert(World<4>{}.world_size() == WorldSize{4} && std::is_empty_v<World<4>>);
  expect_error([] { return World<dynamic>{WorldSize{0}}; }, "a world of zero ranks");
}

BOOST_AUTO_TEST_CASE(listed_groups_keep_their_order) {
  using L = Groups<World<5>, Group<3, 0>, Group<1, 4, 2>>;
  BOOST_TEST(text(L{}) == "[3 0] [1 4 2]");
  static_assert(L{}.leader(Rank{0}) == Rank{3} && L{}.group_rank_base(Rank{3}) == Rank{0});
  static_assert(L{}.group_size(GroupRank{1}) == 3 && std::is_empty_v<L>);
  BOOST_TEST(text(Groups<World<dynamic>>{WorldSize{5}, {{3, 0}, {1, 4, 2}}}) == text(L{}));
}

BOOST_AUTO_TEST_CASE(every_topology_keeps_what_the_concept_promises) {
  check_topology(World<7>{});
  check_topology(Grid<12, 4>{});
  check_topology(Transposed<Grid<12, 4>>{});
  check_topology(Groups<World<4>, Group<2>, Group<3, 1, 0>>{});
  std::mt19937 random(7);
  for (int i = 0; i < 100; ++i) {
    const std::size_t group = 1 + random() % 16;
    const std::size_t world = group * (1 + random() % 4);
    const Grid<dynamic, dynamic> grid{WorldSize{world}, group};
    check_topology(grid);
    check_topology(transpose(grid));
    std::vector<std::size_t> ranks(world);
    for (std::size_t r = 0; r < world; ++r) ranks[r] = r;
    std::shuffle(ranks.begin(), ranks.end(), random);
    std::vector<std::vector<std::size_t>> groups(1);
    for (std::size_t rank : ranks) {
      if (!groups.back().empty() && random() % 3 == 0) groups.emplace_back();
      groups.back().push_back(rank);
    }
    check_topology(Groups<World<dynamic>>{WorldSize{world}, groups});
  }
}

BOOST_AUTO_TEST_CASE(static_and_dynamic_topologies_agree) {
  BOOST_TEST(text(Grid<dynamic, 3>{WorldSize{6}}) == text(Grid<6, 3>{}));
  BOOST_TEST(text(Grid<6, dynamic>{3}) == text(Grid<6, 3>{}));
  BOOST_TEST(text(transpose(Grid<dynamic, 3>{WorldSize{6}})) == text(Transposed<Grid<6, 3>>{}));
  BOOST_TEST(text(transpose(transpose(Grid<dynamic, 3>{WorldSize{6}}))) == text(Grid<6, 3>{}));
}

BOOST_AUTO_TEST_CASE(dynamic_topologies_are_checked_at_construction) {
  expect_error([] { return Grid<dynamic, 4>{WorldSize{6}}; },
               "a world of 6 does not divide into groups of 4");
  expect_error([] { return Grid<6, dynamic>{0}; }, "a world of 6 does not divide into groups of 0");
  expect_error([] { return Grid<dynamic, dynamic>{WorldSize{0}, 3}; },
               "a world of 0 does not divide into groups of 3");
  using L = Groups<World<dynamic>>;
  expect_error([] { return L{WorldSize{3}, {{0, 1}, {1, 2}}}; }, "rank 1 is listed twice");
  expect_error([] { return L{WorldSize{3}, {{0, 1}}}; }, "rank 2 is in no group");
  expect_error([] { return L{WorldSize{3}, {{0, 1, 2, 3}}}; }, "rank 3 is outside the world");
  expect_error([] { return L{WorldSize{2}, {{0, 1}, {}}}; }, "a group is empty");
}

BOOST_AUTO_TEST_SUITE_END()
