// SPDX-License-Identifier: Apache-2.0
// What a GPU decides in the middle of a step, decided here.
#include "lockstep/detail/optim/constants.hpp"

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <limits>

#include "lockstep/detail/bucket/layout.hpp"
#include "lockstep/detail/optim/adam.hpp"
#include "lockstep/detail/optim/sgd.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(optim_constants)

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

}  // namespace

BOOST_AUTO_TEST_CASE(both_arithmetics_get_the_rules_constants) {
  const auto numbers = detail::step_numbers<AdamW>({.lr = 1}, 0.25, 3, 0.5);
  const auto update = AdamW::at<float>({.lr = 1}, 0.25, 3);
  BOOST_TEST(!numbers.skip);
  BOOST_TEST(numbers.in<float>().scale == 0.5F);
  BOOST_TEST(numbers.in<double>().scale == 0.5);
  BOOST_TEST(numbers.in<float>().update.rate == update.rate);
  BOOST_TEST(numbers.in<float>().update.decay == update.decay);
}

BOOST_AUTO_TEST_CASE(gradients_of_micro_batches_are_averaged_then_clipped) {
  detail::StepState state;
  const detail::StepLimits limits{.max_norm = 1};
  const detail::StepInputs<SGD> inputs{{}, 0.1, 0.25};
  const auto clipped = detail::decide_step(inputs, 64 * 64, limits, state);  // a norm of 16
  BOOST_TEST(state.norm == 16);
  BOOST_TEST(clipped.in_double.scale == 0.25 * detail::clip_factor(16, 1));
  const auto small = detail::decide_step(inputs, 1, limits, state);
  BOOST_TEST(small.in_double.scale == 0.25);
  BOOST_TEST(state.updates == 2u);
}

BOOST_AUTO_TEST_CASE(without_a_loss_scale_broken_gradients_break_the_update) {
  detail::StepState state;
  const detail::StepLimits limits{.max_norm = 1};
  const detail::StepInputs<SGD> inputs{{}, 0.1, 1};
  const auto broken = detail::decide_step(inputs, std::nan(""), limits, state);
  BOOST_TEST(!broken.skip);
  BOOST_TEST(std::isnan(broken.in_double.scale));
  BOOST_TEST(detail::decide_step(inputs, infinity, limits, state).in_double.scale == 0);
  BOOST_TEST(state.updates == 2u);
}

BOOST_AUTO_TEST_CASE(with_one_they_are_skipped_and_do_not_count) {
  const detail::StepLimits limits{
      .max_norm = 2, .scales_loss = true, .loss_scale = {.interval = 2}};
  detail::StepState state{.loss_scale = detail::first_loss_scale(limits.loss_scale)};
  const detail::StepInputs<Adam> inputs{{}, 0.1, 1};
  const double squares = std::pow(65536.0 * 8, 2);  // of gradients with a norm of 8

  const auto first = detail::decide_step(inputs, squares, limits, state);
  BOOST_TEST(state.norm == 8);
  BOOST_TEST(std::abs(first.in_double.scale * 65536 - detail::clip_factor(8, 2)) < 1e-15);

  for (const double broken : {infinity, std::nan("")}) {
    BOOST_TEST(detail::decide_step(inputs, broken, limits, state).skip);
    BOOST_TEST(state.skipped);
    BOOST_TEST(state.updates == 1u);
  }
  BOOST_TEST(state.loss_scale.scale == 16384);

  const auto second = detail::decide_step(inputs, std::pow(16384.0, 2), limits, state);
  BOOST_TEST(!second.skip);
  BOOST_TEST(!state.skipped);
  BOOST_TEST(state.updates == 2u);
  BOOST_TEST(second.in_double.scale == 1.0 / 16384);
  BOOST_TEST(second.in_double.update.rate == Adam::at<double>({}, 0.1, 2).rate);
}

BOOST_AUTO_TEST_CASE(pieces_of_a_table_join_neighbours_and_reach_beyond_4_gib) {
  constexpr std::size_t billion = 1'000'000'000;
  struct Net {
    using Parameters = ParameterList<Parameter<"a", float, 3, billion>, Parameter<"b", float, 5>,
                                     Parameter<"c", float, 2, billion>, Parameter<"d", float, 7>>;
  };
  const auto& plan = detail::Layout<Net>::plan();
  const auto pieces = detail::make_table_pieces(
      plan, [](std::size_t p) -> std::size_t { return p == 1 || p == 2 ? 1 : 0; });
  BOOST_TEST_REQUIRE(pieces.size() == 3u);  // d, then c and b, then a
  BOOST_TEST(pieces[0].end == plan.placements[2].offset);
  BOOST_TEST(pieces[1].end == plan.placements[0].offset);
  BOOST_TEST(pieces[2].end == plan.bytes);
  const auto row_at = [&](std::size_t offset) {
    return detail::table_piece_at(pieces.data(), pieces.size(), offset)->row;
  };
  BOOST_TEST(row_at(0) == 0u);
  BOOST_TEST(row_at(pieces[0].end) == 1u);
  BOOST_TEST(row_at(5 * billion) == 1u);
  BOOST_TEST(row_at(pieces[1].end) == 0u);
  BOOST_TEST(row_at(19 * billion) == 0u);
}

BOOST_AUTO_TEST_SUITE_END()
