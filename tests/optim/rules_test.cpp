// SPDX-License-Identifier: Apache-2.0
// Every rule against PyTorch's formulas in double, one number at a time.
#include <array>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <vector>

#include "lockstep/detail/optim/adam.hpp"
#include "lockstep/detail/optim/sgd.hpp"
#include "lockstep/detail/optim/update.hpp"
#include "optim/plain.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(optim_rules)

namespace {

constexpr std::size_t count = 37;

double gradient_at(std::size_t step, std::size_t i) {
  return std::sin(0.7 * static_cast<double>(i) + 1.3 * static_cast<double>(step));
}

/// Twelve steps in storage T; the worst difference from the plain rule in double.
template <class Rule, class T>
double worst_error(const typename Rule::Options& options, const auto& plain_rule) {
  using A = detail::Accumulator<T>;
  std::vector<T> parameters(count), gradients(count);
  std::array<std::vector<A>, 2> memory{std::vector<A>(count), std::vector<A>(count)};
  std::vector<double> expected(count);
  std::vector rules(count, plain_rule);
  for (std::size_t i = 0; i < count; ++i) {
    parameters[i] = static_cast<T>(static_cast<A>(0.25 * static_cast<double>(i % 9) - 1));
    expected[i] = static_cast<double>(static_cast<A>(parameters[i]));
  }
  double worst = 0;
  for (std::size_t s = 1; s <= 12; ++s) {
    for (std::size_t i = 0; i < count; ++i)
      gradients[i] = static_cast<T>(static_cast<A>(gradient_at(s, i)));
    detail::StatesOf<Rule, T> states{};
    for (std::size_t k = 0; k < Rule::states; ++k) states[k] = memory[k].data();
    const auto rule = Rule::template at<A>(options, options.lr, s);
    const auto update = [&](std::size_t first, std::size_t last) {
      auto here = states;
      for (auto& state : here) state += first;
      detail::update_elements<Rule, false, T>(rule, parameters.data() + first,
                                              gradients.data() + first, here, last - first,
                                              std::identity{});
    };
    update(0, 16);
    update(16, count);
    for (std::size_t i = 0; i < count; ++i) {
      rules[i].update(expected[i], static_cast<double>(static_cast<A>(gradients[i])));
      const double have = static_cast<double>(static_cast<A>(parameters[i]));
      worst = std::max(worst, std::abs(have - expected[i]));
    }
  }
  return worst;
}

template <class Rule>
void check(const typename Rule::Options& options, const auto& plain_rule) {
  BOOST_TEST((worst_error<Rule, double>(options, plain_rule) < 1e-14));
  const double in_float = worst_error<Rule, float>(options, plain_rule);
  BOOST_TEST(in_float < 5e-6);
  BOOST_TEST(in_float > 0);
  // Parameters of 16 bits round at every store; states do not.
  BOOST_TEST((worst_error<Rule, BFloat16>(options, plain_rule) < 0.1));
}

}  // namespace

BOOST_AUTO_TEST_CASE(sgd_with_and_without_decay) {
  check<SGD>({.lr = 0.1}, plain::Sgd{.lr = 0.1});
  check<SGD>({.lr = 0.1, .weight_decay = 0.3}, plain::Sgd{.lr = 0.1, .weight_decay = 0.3});
}

BOOST_AUTO_TEST_CASE(momentum_dampening_and_decay) {
  check<SGDMomentum>({.lr = 0.1, .momentum = 0.8}, plain::Sgd{.lr = 0.1, .momentum = 0.8});
  check<SGDMomentum>({.lr = 0.1, .momentum = 0.8, .dampening = 0.4, .weight_decay = 0.2},
                     plain::Sgd{.lr = 0.1, .momentum = 0.8, .dampening = 0.4, .weight_decay = 0.2});
}

BOOST_AUTO_TEST_CASE(nesterov_looks_ahead) {
  check<SGDNesterov>({.lr = 0.1, .momentum = 0.7, .dampening = 0, .weight_decay = 0.2},
                     plain::Sgd{.lr = 0.1, .momentum = 0.7, .weight_decay = 0.2, .nesterov = true});
}

BOOST_AUTO_TEST_CASE(adam_decays_through_the_gradient) {
  check<Adam>({.lr = 0.02}, plain::Adam{.lr = 0.02});
  check<Adam>(
      {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-5, .weight_decay = 0.3},
      plain::Adam{.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-5, .weight_decay = 0.3});
}

BOOST_AUTO_TEST_CASE(adamw_decays_the_parameter) {
  check<AdamW>({.lr = 0.02}, plain::Adam{.lr = 0.02, .weight_decay = 0.01, .decoupled = true});
  check<AdamW>({.lr = 0.02, .weight_decay = 0.5},
               plain::Adam{.lr = 0.02, .weight_decay = 0.5, .decoupled = true});
}

// Both means of a constant gradient are it, once corrected: each step is one learning rate. In
// float, 1 - beta2 computed from a rounded beta2 would be off by 5e-5.
BOOST_AUTO_TEST_CASE(adam_in_float_is_biased_by_no_rounded_beta) {
  float state[2] = {0, 0};
  for (std::size_t step = 1; step <= 50; ++step) {
    float parameter = 0;
    AdamW::at<float>({.weight_decay = 0}, 1, step)(parameter, 0.5f, state);
    BOOST_TEST(std::abs(parameter + 1) < 2e-6, step << ": " << parameter);
  }
}

BOOST_AUTO_TEST_CASE(a_pass_scales_before_the_rule) {
  std::array<double, 2> parameters{1, 2};
  const std::array<double, 2> gradients{4, 8};
  detail::update_elements<SGD, false, double>(SGD::at<double>({}, 0.5, 1), parameters.data(),
                                              gradients.data(), {}, 2, detail::Scaled{0.25});
  BOOST_TEST(parameters[0] == 0.5);
  BOOST_TEST(parameters[1] == 1.0);
}

BOOST_AUTO_TEST_SUITE_END()
