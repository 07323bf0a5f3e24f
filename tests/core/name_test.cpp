// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/core/name.hpp"

#include <boost/test/unit_test.hpp>
#include <string>
#include <type_traits>

#include "lockstep/detail/core/hash.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(core_name)

BOOST_AUTO_TEST_CASE(a_literal_becomes_a_key_of_the_same_text) {
  BOOST_TEST(decltype("fc1.weight"_p)::name == "fc1.weight");
  static_assert(std::is_same_v<decltype("a"_p), detail::Key<"a">>);
  static_assert(!std::is_same_v<detail::Key<"a">, detail::Key<"b">>);
}

BOOST_AUTO_TEST_CASE(keys_join_with_dots_and_indices) {
  constexpr auto key = "blocks"_p / at<13> / "attn.weight"_p;
  BOOST_TEST(decltype(key)::name == "blocks.13.attn.weight");
  static_assert(std::is_same_v<decltype("a"_p / at<0>), detail::Key<"a.0">>);
}

BOOST_AUTO_TEST_CASE(decimals_are_written_like_std_to_string) {
  for (std::size_t n : {0ul, 9ul, 10ul, 99ul, 100ul, 12345ul, static_cast<std::size_t>(-2)}) {
    char text[32];
    const std::string written(text, detail::write_decimal(text, n));
    BOOST_TEST(written == std::to_string(n));
    BOOST_TEST(detail::decimal_digits(n) == written.size());
  }
}

BOOST_AUTO_TEST_CASE(hashes_tell_where_one_text_ends_and_the_next_begins) {
  BOOST_TEST(detail::Hash{}.text("ab").text("c").value() !=
             detail::Hash{}.text("a").text("bc").value());
  BOOST_TEST(detail::Hash{}.text("").value() != detail::Hash{}.value());
  static_assert(detail::hash_of("weight") == detail::hash_of("weight"));
}

BOOST_AUTO_TEST_SUITE_END()
