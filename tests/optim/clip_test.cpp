// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/optim/constants.hpp"

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <limits>
#include <vector>

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(optim_clip)

namespace {

/// Of `count` numbers, relative to long double.
template <class T>
double error_of_squares(std::size_t count) {
  std::vector<T> values(count);
  long double want = 0;
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = static_cast<T>(
        static_cast<detail::Accumulator<T>>(std::sin(0.1 * static_cast<double>(i)) * 3));
    const auto value = static_cast<long double>(static_cast<detail::Accumulator<T>>(values[i]));
    want += value * value;
  }
  const double have = detail::sum_of_squares<T>(values);
  return want == 0 ? have : std::abs(static_cast<double>(have / want - 1));
}

}  // namespace

BOOST_AUTO_TEST_CASE(sums_of_squares_keep_their_digits) {
  for (const std::size_t count : {0u, 1u, 7u, 63u, 64u, 65u, 1000u, 300000u}) {
    BOOST_TEST(error_of_squares<double>(count) < 1e-13);
    BOOST_TEST(error_of_squares<float>(count) < 5e-7);
    BOOST_TEST(error_of_squares<BFloat16>(count) < 5e-7);
  }
}

BOOST_AUTO_TEST_CASE(a_norm_is_clipped_to_the_limit_and_never_raised) {
  BOOST_TEST(detail::clip_factor(0, 1.0) == 1);
  BOOST_TEST(detail::clip_factor(0.5, 1.0) == 1);
  BOOST_TEST(std::abs(detail::clip_factor(4, 1.0) - 0.25) < 1e-6);
  BOOST_TEST(detail::clip_factor(4, 1.0) < 0.25);  // the guard against zero, as in PyTorch
  BOOST_TEST(detail::clip_factor(std::numeric_limits<double>::infinity(), 1.0) == 0);
  BOOST_TEST(std::isnan(detail::clip_factor(std::nan(""), 1.0)));
}

BOOST_AUTO_TEST_CASE(a_limit_of_infinity_is_no_clipping) {
  static_assert(!Clip<>::clips && Clip<2.0>::clips && Clip<2.0>::norm == 2);
  static_assert(Clip<2>::clips && Clip<2>::norm == 2 && Clip<0.5f>::norm == 0.5);
}

BOOST_AUTO_TEST_SUITE_END()
