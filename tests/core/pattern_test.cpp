// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/core/name.hpp"

#include <boost/test/unit_test.hpp>
#include <random>
#include <string>
#include <string_view>

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(name_patterns)

namespace {

/// The definition: a star is nothing, or one character and a star.
bool matches_by_definition(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] == '*') {
    return matches_by_definition(pattern.substr(1), name) ||
           (!name.empty() && matches_by_definition(pattern, name.substr(1)));
  }
  return !name.empty() && pattern[0] == name[0] &&
         matches_by_definition(pattern.substr(1), name.substr(1));
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_star_stands_for_any_characters_or_none) {
  using detail::matches;
  static_assert(matches("embed.*", "embed.weight") && matches("embed.*", "embed."));
  static_assert(!matches("embed.*", "embed") && !matches("embed.*", "an.embed.weight"));
  static_assert(matches("*.bias", "block.3.fc.bias") && !matches("*.bias", "bias"));
  static_assert(matches("block.*.fc.*", "block.3.fc.weight") && matches("*", "") &&
                matches("*norm*", "layernorm1.scale"));
  static_assert(matches("", "") && !matches("", "a") && !matches("a", ""));
}

BOOST_AUTO_TEST_CASE(random_patterns_match_what_the_definition_says) {
  std::mt19937 random(11);
  std::size_t matched = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string pattern, name;
    for (unsigned k = random() % 7; k != 0; --k) pattern += "ab**."[random() % 5];
    for (unsigned k = random() % 9; k != 0; --k) name += "ab."[random() % 3];
    const bool expected = matches_by_definition(pattern, name);
    matched += expected;
    BOOST_TEST_REQUIRE(detail::matches(pattern, name) == expected, pattern << " and " << name);
  }
  BOOST_TEST(matched > 1000u);
}

BOOST_AUTO_TEST_SUITE_END()
