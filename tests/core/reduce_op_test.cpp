// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/core/reduce_op.hpp"

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(core_reduce_op)

namespace {

/// What a backend does: prepare each rank's value, combine in rank order, finish.
template <class T, class Op>
T reduce(Op op, const std::vector<T>& ranks) {
  auto result = op.prepare(ranks[0]);
  for (std::size_t i = 1; i < ranks.size(); ++i) result = op.combine(result, op.prepare(ranks[i]));
  return op.template finish<T>(result, ranks.size());
}

}  // namespace

BOOST_AUTO_TEST_CASE(sums_average_products_and_scaled_sums) {
  const std::vector<double> values{1.5, -2, 4};
  BOOST_TEST(reduce(Sum{}, values) == 3.5);
  BOOST_TEST(reduce(Average{}, values) == 3.5 / 3);
  BOOST_TEST(reduce(Product{}, values) == -12.0);
  BOOST_TEST(reduce(PreMultipliedSum<double>{0.5}, values) == 1.75);
  BOOST_TEST(reduce(Min{}, values) == -2.0);
  BOOST_TEST(reduce(Max{}, values) == 4.0);
}

BOOST_AUTO_TEST_CASE(sixteen_bit_types_round_once_at_the_end) {
  // 2048 + 1 is not a half: rounding after every addition would lose every 1.
  std::vector<Half> values(9, Half(1.f));
  values[0] = Half(2048.f);
  BOOST_TEST(static_cast<float>(reduce(Sum{}, values)) == 2056.f);
  std::vector<BFloat16> brains(9, BFloat16(1.f));
  brains[0] = BFloat16(256.f);
  BOOST_TEST(static_cast<float>(reduce(Sum{}, brains)) == 264.f);
  BOOST_TEST(static_cast<float>(reduce(Min{}, values)) == 1.f);
}

BOOST_AUTO_TEST_CASE(integers_wrap_instead_of_being_undefined) {
  BOOST_TEST(
      reduce(Sum{}, std::vector<std::int32_t>{std::numeric_limits<std::int32_t>::max(), 1}) ==
      std::numeric_limits<std::int32_t>::min());
  BOOST_TEST(reduce(Product{}, std::vector<std::uint16_t>{65535, 65535}) == 1);
  BOOST_TEST(reduce(Sum{}, std::vector<std::int8_t>{-100, -100}) == 56);
  BOOST_TEST(reduce(Product{}, std::vector<std::int64_t>{-3, 7}) == -21);
  BOOST_TEST(reduce(BitAnd{}, std::vector<std::uint8_t>{0b1100, 0b1010}) == 0b1000);
  BOOST_TEST(reduce(BitOr{}, std::vector<std::uint8_t>{0b1100, 0b1010}) == 0b1110);
  BOOST_TEST(reduce(BitXor{}, std::vector<std::int32_t>{-1, 0b1010}) == ~0b1010);
}

BOOST_AUTO_TEST_CASE(a_nan_on_any_rank_reaches_all) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::vector<float>& ranks :
       {std::vector<float>{nan, 1, 2}, {1, nan, 2}, {1, 2, nan}}) {
    BOOST_TEST(std::isnan(reduce(Min{}, ranks)));
    BOOST_TEST(std::isnan(reduce(Max{}, ranks)));
    BOOST_TEST(std::isnan(reduce(Sum{}, ranks)));
  }
}

BOOST_AUTO_TEST_CASE(a_reduction_is_a_constant_when_its_input_is) {
  static_assert(Sum{}.finish<int>(Sum{}.combine(Sum{}.prepare(2), Sum{}.prepare(3)), 2) == 5);
}

BOOST_AUTO_TEST_SUITE_END()
