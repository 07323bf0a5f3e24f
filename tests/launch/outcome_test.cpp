// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/launch/outcome.hpp"

#include <boost/test/unit_test.hpp>
#include <exception>
#include <stdexcept>
#include <string>

using namespace lockstep;
using lockstep::detail::Outcome;
using lockstep::detail::RankEnd;
using lockstep::detail::summary;

BOOST_AUTO_TEST_SUITE(outcome)

BOOST_AUTO_TEST_CASE(what_a_rank_throws_reaches_the_launcher_whole_or_not_at_all) {
  const Error error = Error("step", "nan", "look").on(Rank{3}).as_consequence();
  const std::string bytes = detail::to_bytes(detail::error_of(std::make_exception_ptr(error)));
  const auto got = detail::error_from_bytes(bytes);
  BOOST_TEST_REQUIRE(got.has_value());
  BOOST_TEST(detail::with_rank(*got, Rank{0}).text() == std::string(error.what()));
  BOOST_TEST(got->is_consequence());
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    BOOST_TEST(!detail::error_from_bytes(std::string_view(bytes).substr(0, n)).has_value());
  }
}

BOOST_AUTO_TEST_CASE(an_exception_that_names_no_rank_gets_one) {
  const auto text = [](auto thrown) {
    const Error error = detail::error_of(std::make_exception_ptr(thrown));
    return std::string(detail::with_rank(error, Rank{2}).what());
  };
  BOOST_TEST(text(Error("step", "nan", "look")) == "lockstep: rank 2, step: nan; look");
  BOOST_TEST(text(std::runtime_error("no data")) == "lockstep: rank 2: no data");
  BOOST_TEST(text(7) == "lockstep: rank 2: an exception that is no std::exception");
}

BOOST_AUTO_TEST_CASE(consequences_are_told_by_operation_without_repeating_the_reason) {
  const auto end = [](std::size_t rank, const char* operation) {
    return RankEnd{Rank{rank}, 1, 0, Error(operation, "rank 1 failed: nan", "").as_consequence()};
  };
  Outcome job;
  job.first = RankEnd{Rank{1}, 0, 9, {}};
  job.consequences = {end(3, "barrier"), end(2, "all_reduce"), end(0, "barrier")};
  job.stubborn = {Rank{4}};
  BOOST_TEST(job.shell_status() == 137);
  BOOST_TEST(summary(job) ==
             "lockstep: rank 2 failed because of that, in all_reduce\n"
             "lockstep: ranks 0, 3 failed because of that, in barrier\n"
             "lockstep: rank 4 did not end when asked (SIGTERM) and was killed\n");
}

BOOST_AUTO_TEST_CASE(a_failure_may_be_repeated_unless_somebody_wants_an_end_or_it_would_not_help) {
  Outcome job;
  BOOST_TEST(!job.may_restart());
  job.first = RankEnd{Rank{1}, 0, 9, {}};
  BOOST_TEST(job.may_restart());
  BOOST_TEST(job.first->message() == "rank 1 failed first (killed by signal 9 (Killed))");
  job.is_unwanted = true;
  BOOST_TEST(!job.may_restart());

  Outcome misspelt;
  misspelt.first = RankEnd{Rank{0}, 1, 0, Error("launch", "--seed is 'x'", "")};
  BOOST_TEST(!misspelt.may_restart());

  Outcome interrupted;
  interrupted.interrupted = SIGTERM;
  BOOST_TEST(!interrupted.may_restart());
  BOOST_TEST(interrupted.shell_status() == 143);
}

BOOST_AUTO_TEST_CASE(ranks_that_have_stopped_are_no_failure_and_a_failure_beside_them_counts) {
  const RankEnd saved{Rank{0}, stopped_status, 0, {}};
  BOOST_TEST(saved.is_stopped());
  BOOST_TEST(!saved.is_failure());
  const RankEnd killed{Rank{0}, stopped_status, SIGKILL, {}};
  BOOST_TEST(killed.is_failure());

  Outcome job;
  job.interrupted = SIGTERM;
  job.stopped = {Rank{0}, Rank{1}};
  BOOST_TEST(job.is_stopped());
  BOOST_TEST(job.shell_status() == 75);
  BOOST_TEST(summary(job) == "");

  Outcome with_failure = job;
  with_failure.late = RankEnd{Rank{2}, 1, 0, {}};
  BOOST_TEST(!with_failure.is_stopped());
  BOOST_TEST(with_failure.shell_status() == 1);

  Outcome with_stubborn = job;
  with_stubborn.stubborn = {Rank{2}};
  BOOST_TEST(!with_stubborn.is_stopped());
  BOOST_TEST(with_stubborn.shell_status() == 143);
}

BOOST_AUTO_TEST_SUITE_END()
