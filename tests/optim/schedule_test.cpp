// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/optim/schedule.hpp"

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <string>

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(optim_schedule)

BOOST_AUTO_TEST_CASE(constant_is_one) {
  BOOST_TEST(Constant::factor({}, {.step = 0, .epoch = 0}) == 1);
  BOOST_TEST(Constant::factor({}, {.step = 1000000, .epoch = 90}) == 1);
}

BOOST_AUTO_TEST_CASE(step_decay_falls_every_so_many_epochs) {
  const StepDecay::Options options{.epochs = 30, .factor = 0.1};
  BOOST_TEST(StepDecay::factor(options, {.step = 7, .epoch = 0}) == 1);
  BOOST_TEST(StepDecay::factor(options, {.step = 7, .epoch = 29}) == 1);
  BOOST_TEST(StepDecay::factor(options, {.step = 7, .epoch = 30}) == 0.1);
  BOOST_TEST(std::abs(StepDecay::factor(options, {.step = 7, .epoch = 89}) - 0.01) < 1e-15);
}

BOOST_AUTO_TEST_CASE(step_decay_without_epochs_is_an_error) {
  BOOST_CHECK_EXCEPTION(StepDecay::factor({.epochs = 0}, {}), Error, [](const Error& error) {
    return std::string(error.what()).find("every 0 epochs") != std::string::npos;
  });
}

BOOST_AUTO_TEST_CASE(cosine_goes_from_one_to_its_last_value_and_stays) {
  const Cosine::Options options{.steps = 100, .last = 0.1};
  BOOST_TEST(Cosine::factor(options, {.step = 0}) == 1);
  BOOST_TEST(std::abs(Cosine::factor(options, {.step = 50}) - 0.55) < 1e-15);
  BOOST_TEST(std::abs(Cosine::factor(options, {.step = 100}) - 0.1) < 1e-15);
  BOOST_TEST(Cosine::factor(options, {.step = 5000}) == Cosine::factor(options, {.step = 100}));
}

BOOST_AUTO_TEST_CASE(cosine_rises_while_it_warms_up_and_falls_ever_after) {
  const Cosine::Options options{.warmup = 10, .steps = 60};
  BOOST_TEST(Cosine::factor(options, {.step = 0}) == 0.1);  // the first step moves already
  BOOST_TEST(Cosine::factor(options, {.step = 9}) == 1);
  BOOST_TEST(Cosine::factor(options, {.step = 10}) == 1);
  for (std::uint64_t s = 1; s < 10; ++s)
    BOOST_TEST(Cosine::factor(options, {.step = s}) > Cosine::factor(options, {.step = s - 1}));
  for (std::uint64_t s = 11; s <= 60; ++s)
    BOOST_TEST(Cosine::factor(options, {.step = s}) < Cosine::factor(options, {.step = s - 1}));
  BOOST_TEST(std::abs(Cosine::factor(options, {.step = 60})) < 1e-15);
}

BOOST_AUTO_TEST_CASE(cosine_needs_more_steps_than_its_warm_up) {
  BOOST_CHECK_THROW(Cosine::factor({}, {}), Error);
  BOOST_CHECK_EXCEPTION(
      Cosine::factor({.warmup = 5, .steps = 5}, {}), Error, [](const Error& error) {
        return std::string(error.what()).find("5 steps, of which 5 are its warm-up") !=
               std::string::npos;
      });
}

BOOST_AUTO_TEST_SUITE_END()
