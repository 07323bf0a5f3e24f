// SPDX-License-Identifier: Apache-2.0
// Means over ranks, of which some have seen nothing.
#include "lockstep/detail/observe/scores.hpp"

#include <boost/test/unit_test.hpp>
#include <string>

#include "comm/ranks.hpp"

using namespace lockstep;
using ranks::As;
using ranks::require;

BOOST_AUTO_TEST_SUITE(comm_tally)

namespace {

/// All ranks ended without a word.
bool all_well(const ranks::Ends& ends) {
  for (const std::string& end : ends) BOOST_TEST(end == "");
  return std::ranges::count(ends, "") == std::ssize(ends);
}

}  // namespace

BOOST_AUTO_TEST_CASE(uneven_shares_count_by_their_size) {
  for (const std::size_t world : {1, 2, 4}) {
    for (const As as : {As::processes, As::threads}) {
      BOOST_TEST(all_well(ranks::run(as, world, [world](ranks::Shared& comm) {
        // Rank r has seen r + 1 samples of loss r, and has them all right.
        const auto r = static_cast<double>(comm.rank().value());
        Tally tally;
        tally.add("loss", r * (r + 1), r + 1);
        tally.add("accuracy", r + 1, r + 1);
        const Scores scores = reduce(comm, tally);
        double sum = 0;
        double count = 0;
        for (std::size_t i = 0; i < world; ++i) {
          sum += static_cast<double>(i * (i + 1));
          count += static_cast<double>(i + 1);
        }
        require(scores["loss"] == sum / count, "the mean is wrong");
        require(scores.count("loss") == count, "the count is wrong");
        require(scores["accuracy"] == 1, "the second name is wrong");
      })));
    }
  }
}

BOOST_AUTO_TEST_CASE(counts_beyond_float_are_exact) {
  BOOST_TEST(all_well(ranks::run(As::processes, 2, [](ranks::Shared& comm) {
    Tally tally;
    tally.add("tokens", 1, 16777217);  // 2^24 + 1
    require(reduce(comm, tally).count("tokens") == 33554434, "the count was rounded");
  })));
}

BOOST_AUTO_TEST_CASE(ranks_without_a_sample_take_part) {
  for (const std::size_t world : {2, 4}) {
    for (std::size_t only = 0; only < world; ++only) {
      BOOST_TEST(all_well(ranks::run(As::processes, world, [only](ranks::Shared& comm) {
        Tally tally;
        if (comm.rank() == Rank{only}) {
          tally.add("loss", 6, 4);
          tally.add("a name: 'odd', \n\"it\" is", 1, 1);
        }
        const Scores scores = reduce(comm, tally);
        require(scores["loss"] == 1.5 && scores.count("loss") == 4, "the mean is wrong");
        require(scores["a name: 'odd', \n\"it\" is"] == 1, "the odd name is wrong");
        require(reduce(comm, Tally()).empty(), "nobody has anything");
      })));
    }
  }
}

BOOST_AUTO_TEST_CASE(names_met_in_another_order_are_the_same_names) {
  BOOST_TEST(all_well(ranks::run(As::processes, 2, [](ranks::Shared& comm) {
    const bool first = comm.rank() == Rank{0};
    Tally tally;
    tally.add(first ? "loss" : "accuracy", first ? 1 : 30, 1);
    tally.add(first ? "accuracy" : "loss", first ? 10 : 3, 1);
    const Scores scores = reduce(comm, tally);
    require(scores["loss"] == 2 && scores["accuracy"] == 20, "the means are wrong");
    require(scores.begin()->name == "loss", "the order is rank 0's");
  })));
}

BOOST_AUTO_TEST_CASE(other_names_are_an_error_on_every_rank_that_says_both) {
  const ranks::Ends ends = ranks::run(As::processes, 4, [](ranks::Shared& comm) {
    Tally tally;
    if (comm.rank() != Rank{0}) {
      tally.add("loss", 1, 1);
      tally.add(comm.rank() == Rank{3} ? "acuracy" : "accuracy", 1, 1);
    }
    reduce(comm, tally);
  });
  for (std::size_t r = 0; r < ends.size(); ++r) {
    BOOST_TEST(ends[r] ==
               "lockstep: rank " + std::to_string(r) +
                   ", reduce: rank 1 has tallied 'loss', 'accuracy' and rank 3 'loss', 'acuracy'; "
                   "tally the same names on all ranks that tally any");
  }
}

BOOST_AUTO_TEST_SUITE_END()
