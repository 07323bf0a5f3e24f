// SPDX-License-Identifier: Apache-2.0
// A tally of one rank. tests/comm/tally_test.cpp reduces it over several.
#include "lockstep/detail/observe/scores.hpp"

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <string>

#include "lockstep/detail/comm/loopback.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(observe_tally)

BOOST_AUTO_TEST_CASE(means_are_taken_over_everything_that_was_added) {
  Tally tally;
  tally.add("loss", 6, 2);
  tally.add("accuracy", 1, 2);
  tally.add("loss", 3, 1);
  BOOST_TEST(tally.mean("loss") == 3);
  BOOST_TEST(tally.mean("accuracy") == 0.5);
  BOOST_TEST(tally.begin()->name == "loss");
  BOOST_TEST(tally.size() == 2u);
  tally.clear();
  BOOST_TEST(tally.empty());
}

BOOST_AUTO_TEST_CASE(scores_are_looked_up_and_walked_in_order_of_first_use) {
  Tally tally;
  tally.add("b", 4, 2);
  tally.add("a", 9, 3);
  LoopbackCommunicator comm;
  const Scores scores = reduce(comm, tally);
  BOOST_TEST(scores["a"] == 3);
  BOOST_TEST(scores.count("b") == 2);
  BOOST_TEST((scores.contains("a") && !scores.contains("c")));
  std::string order;
  for (const Score& score : scores) order += score.name;
  BOOST_TEST(order == "ba");
  BOOST_TEST((scores == tally.scores()));
}

BOOST_AUTO_TEST_CASE(a_name_that_is_not_there_is_an_error_that_says_which_are) {
  Tally tally;
  tally.add("loss", 1, 1);
  tally.add("accuracy", 1, 1);
  BOOST_CHECK_EXCEPTION(tally.mean("los"), Error, [](const Error& error) {
    return error.what() ==
           std::string("lockstep: scores: there is no 'los'; there are: loss, accuracy");
  });
  BOOST_CHECK_THROW(Scores()["loss"], Error);
}

BOOST_AUTO_TEST_CASE(a_mean_of_nothing_is_no_number) {
  Tally tally;
  tally.add("loss", 0, 0);
  LoopbackCommunicator comm;
  BOOST_TEST(std::isnan(reduce(comm, tally)["loss"]));
  BOOST_TEST(reduce(comm, Tally()).empty());
}

BOOST_AUTO_TEST_SUITE_END()
