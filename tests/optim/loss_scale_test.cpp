// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/optim/constants.hpp"

#include <boost/test/unit_test.hpp>
#include <limits>

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(optim_loss_scale)

BOOST_AUTO_TEST_CASE(the_defaults_are_grad_scalers) {
  constexpr detail::LossScale first = detail::first_loss_scale({});
  static_assert(first.scale == 65536 && first.good_steps == 0);
  detail::LossScale scale = first;
  for (int step = 0; step != 1999; ++step) scale = detail::next_loss_scale(scale, true, {});
  BOOST_TEST(scale.scale == 65536);
  BOOST_TEST(scale.good_steps == 1999u);
  scale = detail::next_loss_scale(scale, true, {});
  BOOST_TEST(scale.scale == 131072);
  BOOST_TEST(scale.good_steps == 0u);
}

BOOST_AUTO_TEST_CASE(a_bad_step_halves_it_and_counting_begins_anew) {
  const LossScaleOptions options{.initial = 8, .growth = 4, .backoff = 0.5, .interval = 3};
  detail::LossScale scale = detail::first_loss_scale(options);
  const auto after = [&](bool finite) {
    scale = detail::next_loss_scale(scale, finite, options);
    return scale.scale;
  };
  BOOST_TEST(after(true) == 8);
  BOOST_TEST(after(true) == 8);
  BOOST_TEST(after(false) == 4);
  BOOST_TEST(after(false) == 2);
  BOOST_TEST(after(true) == 2);
  BOOST_TEST(after(true) == 2);
  BOOST_TEST(after(true) == 8);
  BOOST_TEST(scale.good_steps == 0u);
}

BOOST_AUTO_TEST_CASE(it_does_not_grow_out_of_floats_range) {
  const LossScaleOptions options{.initial = 0x1p127F, .growth = 2, .backoff = 0.5, .interval = 1};
  const detail::LossScale scale =
      detail::next_loss_scale(detail::first_loss_scale(options), true, options);
  BOOST_TEST(scale.scale == 0x1p127F);
}

BOOST_AUTO_TEST_CASE(infinities_and_what_is_no_number_are_not_finite) {
  static_assert(detail::is_finite(0) && detail::is_finite(-1e308) && detail::is_finite(0x1p-1074));
  BOOST_TEST(!detail::is_finite(std::numeric_limits<double>::infinity()));
  BOOST_TEST(!detail::is_finite(-std::numeric_limits<double>::infinity()));
  BOOST_TEST(!detail::is_finite(std::numeric_limits<double>::quiet_NaN()));
}

BOOST_AUTO_TEST_SUITE_END()
