// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/core/strong.hpp"

#include <boost/test/unit_test.hpp>
#include <concepts>
#include <sstream>

#include "lockstep/detail/core/bytes.hpp"
#include "lockstep/detail/core/error.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(core_strong)

namespace {
template <class T>
concept Addable = requires(T a, T b) { a + b; };
}  // namespace

BOOST_AUTO_TEST_CASE(strong_types_do_not_convert_into_each_other) {
  static_assert(!std::convertible_to<int, Rank> && !std::convertible_to<Rank, std::size_t>);
  static_assert(!std::convertible_to<Rank, WorldSize> && !std::constructible_from<Rank, WorldSize>);
  static_assert(!std::equality_comparable_with<Epoch, Seed>);
  static_assert(!Addable<Rank> && Addable<Rank::value_type>);
  BOOST_TEST(Rank{3}.value() == 3u);
  BOOST_TEST((Rank{1} < Rank{2} && Rank{2} == Rank{2}));
  std::ostringstream out;
  out << Rank{7};
  BOOST_TEST(out.str() == "7");
}

BOOST_AUTO_TEST_CASE(byte_counts_round_up_and_notice_overflow) {
  BOOST_TEST(25_MiB == 26214400u);
  BOOST_TEST(detail::align_up(0) == 0u);
  BOOST_TEST(detail::align_up(1) == 256u);
  BOOST_TEST(detail::align_up(256) == 256u);
  BOOST_TEST(detail::saturating_product(3, 4) == 12u);
  BOOST_TEST(detail::saturating_product(0, detail::too_large) == 0u);
  BOOST_TEST(detail::saturating_product(1ull << 40, 1ull << 40) == detail::too_large);
}

BOOST_AUTO_TEST_CASE(an_error_says_who_did_what_and_what_to_do) {
  const Error error("all_reduce", "the counts differ, 7 here and 8 on rank 0", "pass equal counts");
  BOOST_TEST(error.what() ==
             "lockstep: all_reduce: the counts differ, 7 here and 8 on rank 0; pass equal counts");
  const Error on_rank = error.on(Rank{2});
  BOOST_TEST(on_rank.what() ==
             "lockstep: rank 2, all_reduce: the counts differ, 7 here and 8 on rank 0; pass equal "
             "counts");
  BOOST_TEST((on_rank.rank() == Rank{2}));
  BOOST_TEST(on_rank.operation() == "all_reduce");
  BOOST_TEST(on_rank.advice() == "pass equal counts");
}

BOOST_AUTO_TEST_CASE(check_names_the_callers_line) {
  detail::check(true, "never thrown");
  const int line = __LINE__ + 2;
  try {
    detail::check(false, "turn it on");
    BOOST_ERROR("check did not throw");
  } catch (const Error& error) {
    BOOST_TEST(error.advice() == "turn it on");
    const std::string place = "strong_test.cpp:" + std::to_string(line);
    BOOST_TEST(error.operation().find(place) != std::string::npos);
  }
}

BOOST_AUTO_TEST_SUITE_END()
