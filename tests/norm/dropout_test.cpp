// SPDX-License-Identifier: Apache-2.0
// Dropout on the host: rates, factors, every element type and size, in place and not.
#include "lockstep/detail/norm/dropout.hpp"

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

BOOST_AUTO_TEST_SUITE(norm_dropout)

namespace {

using namespace lockstep;

/// A step with a key of its own.
template <bool Trains>
struct KeyedStep {
  static constexpr bool draws = true;
  static constexpr bool is_training() { return Trains; }
  std::uint64_t key = 1;
  LayerRandom random(std::uint64_t layer) const { return detail::layer_random(key, layer); }
};

template <class T>
double number(T value) {
  return static_cast<double>(static_cast<detail::Accumulator<T>>(value));
}

template <class T>
std::vector<T> numbers(std::size_t count) {
  std::vector<T> all(count);
  for (std::size_t i = 0; i < count; ++i)
    all[i] = static_cast<T>(static_cast<detail::Accumulator<T>>(0.5 + static_cast<double>(i % 64)));
  return all;
}

template <class T>
HostView<T, dynamic> view(std::vector<T>& of) {
  return HostView<T, dynamic>(of.data(), of.size());
}

/// Every element is dropped or has the factor, neither more nor less often than chance allows, and
/// elements do not depend on how many there are.
template <class T>
void look_at(double p) {
  const Dropout<"drop1"> drop(p);
  const auto factor = static_cast<detail::Accumulator<T>>(p < 1 ? 1 / (1 - p) : 0);
  std::vector<T> most(100'000);
  for (const std::size_t count : {100'000u, 0u, 1u, 2u, 3u, 17u, 1024u}) {
    KeyedStep<true> step;
    std::vector<T> x = numbers<T>(count);
    std::vector<T> y(count);
    drop.forward(step, view(x), view(y));
    if (count == most.size()) most = y;
    std::size_t dropped = 0;
    std::size_t wrong = 0;  // a check of its own for each would take half a minute
    for (std::size_t i = 0; i < count; ++i) {
      const T kept = static_cast<T>(static_cast<detail::Accumulator<T>>(x[i]) * factor);
      const double is = number(y[i]);
      if (is == 0) ++dropped;
      wrong += (is == 0 || is == number(kept)) && is == number(most[i]) ? 0 : 1;
    }
    if (count == most.size()) {
      const double n = static_cast<double>(count);
      BOOST_TEST(std::abs(static_cast<double>(dropped) - n * p) <= 5 * std::sqrt(n * p * (1 - p)));
    }
    drop.backward(step, view(x), view(x));  // in place, and the same elements
    for (std::size_t i = 0; i < count; ++i) wrong += number(x[i]) == number(y[i]) ? 0 : 1;
    BOOST_TEST(wrong == 0u, count << " elements");
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(elements_are_dropped_as_often_as_wanted_and_the_others_scaled) {
  for (const double p : {0.0, 1e-3, 0.1, 0.5, 0.9, 1.0}) {
    BOOST_TEST_CONTEXT("p = " << p) {
      look_at<float>(p);
      look_at<double>(p);
      look_at<Half>(p);
      look_at<BFloat16>(p);
    }
  }
}

// Places, layers and keys are drawn for themselves: two patterns of 4096 elements that agree in
// more than 55% of them would be a chance of 10^-10.
BOOST_AUTO_TEST_CASE(patterns_of_places_layers_and_keys_have_nothing_in_common) {
  const auto pattern = [](const auto& drop, std::uint64_t key) {
    KeyedStep<true> step{key};
    std::vector<float> x(8192, 1.f);
    drop.forward(step, view(x), view(x));
    return x;
  };
  const Dropout<"drop1"> drop1;
  std::vector<std::vector<float>> patterns;
  for (std::uint64_t key = 0; key < 4; ++key) patterns.push_back(pattern(drop1, key));
  patterns.push_back(pattern(Dropout<"drop2">(), 0));
  patterns.push_back(pattern(Dropout<>("blocks.3.drop"), 0));
  for (std::size_t a = 0; a < patterns.size(); ++a) {
    for (std::size_t b = 0; b < patterns.size(); ++b) {
      for (const std::size_t shift : {0u, 1u, 2u, 64u}) {
        if (a == b && shift == 0) continue;
        std::size_t equal = 0;
        for (std::size_t i = 0; i < 4096; ++i) equal += patterns[a][i] == patterns[b][i + shift];
        BOOST_TEST(std::abs(static_cast<double>(equal) - 2048) < 205,
                   a << " and " << b << " agree in " << equal);
      }
    }
  }
  BOOST_TEST((pattern(Dropout<>("drop1"), 2) == patterns[2]));  // a name is a name
}

BOOST_AUTO_TEST_CASE(an_evaluation_copies) {
  KeyedStep<false> step;
  std::vector<float> x = numbers<float>(19);
  std::vector<float> y(19);
  Dropout<"drop1">(1).forward(step, view(x), view(y));
  BOOST_TEST((x == y));
  Dropout<"drop1">(1).forward(step, view(x), view(x));
  BOOST_TEST((x == y));
}

BOOST_AUTO_TEST_CASE(what_makes_no_sense_is_rejected_in_words) {
  const auto words = [](const auto& f) -> std::string {
    try {
      f();
      return "nothing was rejected";
    } catch (const Error& error) {
      return error.what();
    }
  };
  for (const double p : {-0.1, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    BOOST_TEST(words([&] { Dropout<"drop1"> drop(p); })
                   .find("Dropout: the probability of drop1 is " + std::to_string(p) +
                         "; give it a number from 0 to 1") != std::string::npos);
  }
  KeyedStep<true> step;
  std::vector<float> x(3);
  std::vector<float> y(2);
  BOOST_TEST(words([&] {
               Dropout<"drop1">().forward(step, view(x), view(y));
             }).find("Dropout: drop1 reads 3 elements and writes 2") != std::string::npos);
}

BOOST_AUTO_TEST_SUITE_END()
