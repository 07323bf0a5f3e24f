// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/core/error.hpp"

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <limits>
#include <string>

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(core_error)

BOOST_AUTO_TEST_CASE(sentences_are_made_of_words_and_numbers) {
  const std::string name = "fc1";
  BOOST_TEST(detail::text({}) == "");
  BOOST_TEST(detail::text({"rank ", Rank{2}, " of ", WorldSize{4}, ", ", name}) ==
             "rank 2 of 4, fc1");
  BOOST_TEST(detail::text({0, " ", -7, " ", std::uint16_t{65535}}) == "0 -7 65535");
  BOOST_TEST(detail::text({std::numeric_limits<std::int64_t>::min()}) == "-9223372036854775808");
  BOOST_TEST(detail::text({std::numeric_limits<std::uint64_t>::max()}) == "18446744073709551615");
  BOOST_TEST(detail::text({std::string_view("a\0b", 3)}).size() == 3u);
}

BOOST_AUTO_TEST_CASE(an_error_says_which_rank_what_and_what_to_do) {
  try {
    detail::fail("all_reduce", {"the counts differ, ", 7, " here and ", 8, " there"}, "count again",
                 Rank{2});
  } catch (const Error& error) {
    BOOST_TEST(error.what() ==
               std::string("lockstep: rank 2, all_reduce: the counts differ, 7 here and 8 there; "
                           "count again"));
    BOOST_TEST(error.problem() == "the counts differ, 7 here and 8 there");
    BOOST_TEST(!error.is_consequence());
    const Error elsewhere = error.as_consequence().on(Rank{3});
    BOOST_TEST(elsewhere.is_consequence());
    BOOST_TEST(std::string(elsewhere.text()).starts_with("lockstep: rank 3, all_reduce"));
  }
}

BOOST_AUTO_TEST_CASE(control_characters_in_a_message_are_escaped) {
  const Error error("load", std::string("no tensor 'a\0' and\nno 'b\x1b'", 26), "look\x7f");
  BOOST_TEST(std::string(error.what()) ==
             "lockstep: load: no tensor 'a\\x00' and\nno 'b\\x1b'; look\\x7f");
}

BOOST_AUTO_TEST_CASE(a_check_names_its_place) {
  BOOST_CHECK_NO_THROW(detail::check(true, "nothing"));
  try {
    detail::check(false, "do this", "file.cpp", 12);
    BOOST_ERROR("the check passed");
  } catch (const Error& error) {
    BOOST_TEST(error.what() ==
               std::string("lockstep: file.cpp:12: a condition does not hold; do this"));
  }
}

BOOST_AUTO_TEST_SUITE_END()
