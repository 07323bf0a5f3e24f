// SPDX-License-Identifier: Apache-2.0
// The layers of the examples' convolutional network against their definitions, in plain loops.
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "conv2d.hpp"
#include "lockstep/detail/core/view.hpp"
#include "max_pool.hpp"

BOOST_AUTO_TEST_SUITE(convolutional_layers)

namespace {

using namespace lockstep;
using Tensor = HostView<double, dynamic, dynamic, dynamic, dynamic>;

/// A tensor of four axes with memory of its own, filled at random.
struct Random {
  std::vector<double> values;
  Tensor view;

  Random(std::mt19937& random, std::size_t a, std::size_t b, std::size_t c, std::size_t d)
      : values(a * b * c * d), view(values.data(), a, b, c, d) {
    std::normal_distribution<double> normal;
    for (double& value : values) value = normal(random);
  }
};

/// Calls `f(n, o, c, y, x, i, j)` for every product of a convolution: the pixel (y, x) of output
/// channel o is met by weight (o, c, i, j) at the pixel (y + i - tall / 2, x + j - wide / 2) of
/// input channel c.
void each_product(const Tensor& inputs, const Tensor& weight, const auto& f) {
  const auto size = [](const Tensor& view, std::size_t axis) {
    return static_cast<std::ptrdiff_t>(view.extent(axis));
  };
  const std::ptrdiff_t up = size(weight, 2) / 2, left = size(weight, 3) / 2;
  for (std::ptrdiff_t n = 0; n < size(inputs, 0); ++n)
    for (std::ptrdiff_t o = 0; o < size(weight, 0); ++o)
      for (std::ptrdiff_t c = 0; c < size(weight, 1); ++c)
        for (std::ptrdiff_t y = 0; y < size(inputs, 2); ++y)
          for (std::ptrdiff_t x = 0; x < size(inputs, 3); ++x)
            for (std::ptrdiff_t i = 0; i < size(weight, 2); ++i)
              for (std::ptrdiff_t j = 0; j < size(weight, 3); ++j) {
                const std::ptrdiff_t row = y + i - up, column = x + j - left;
                if (row < 0 || row >= size(inputs, 2)) continue;
                if (column < 0 || column >= size(inputs, 3)) continue;
                f(n, o, c, y, x, i, j, row, column);
              }
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  BOOST_TEST_REQUIRE(a.size() == b.size());
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    BOOST_TEST(std::isfinite(a[i]));
    worst = std::max(worst, std::abs(a[i] - b[i]));
  }
  return worst;
}

void check_convolution(std::mt19937& random) {
  const auto size = [&](std::size_t most) { return 1 + random() % most; };
  const std::size_t n = random() % 4, in = size(4), out = size(5), height = size(7),
                    width = size(9);
  const std::size_t tall = 2 * size(3) - 1, wide = 2 * size(3) - 1;
  std::ostringstream text;
  text << n << " x " << in << " x " << height << " x " << width << " to " << out << ", " << tall
       << " x " << wide;
  const Random inputs(random, n, in, height, width), weight(random, out, in, tall, wide);
  const Random bias(random, 1, 1, 1, out), errors(random, n, out, height, width);
  const HostView<const double, dynamic> biases(bias.values.data(), out);
  Random outputs(random, n, out, height, width), want_outputs = outputs;
  Random gradient(random, n, in, height, width), weight_gradient(random, out, in, tall, wide);
  std::vector<double> want_gradient(gradient.values.size()), bias_gradient(out, 7.0);
  std::vector<double> want_weights(weight.values.size()), want_biases(out);

  const Tensor wanted(want_outputs.values.data(), n, out, height, width);
  const Tensor slopes(want_gradient.data(), n, in, height, width);
  const Tensor weights(want_weights.data(), out, in, tall, wide);
  for (std::size_t k = 0; k < want_outputs.values.size(); ++k) {
    const std::size_t channel = k / (height * width) % out;
    want_outputs.values[k] = biases(channel);
    want_biases[channel] += errors.values[k];
  }
  each_product(inputs.view, weight.view,
               [&](auto s, auto o, auto c, auto y, auto x, auto i, auto j, auto row, auto column) {
                 wanted(s, o, y, x) += weight.view(o, c, i, j) * inputs.view(s, c, row, column);
                 weights(o, c, i, j) += errors.view(s, o, y, x) * inputs.view(s, c, row, column);
                 slopes(s, c, row, column) += weight.view(o, c, i, j) * errors.view(s, o, y, x);
               });

  Conv2d<double> convolution;
  convolution.forward(inputs.view, weight.view, biases, outputs.view);
  convolution.parameter_gradients(inputs.view, errors.view, weight_gradient.view,
                                  HostView<double, dynamic>(bias_gradient.data(), out));
  convolution.input_gradient(errors.view, weight.view, gradient.view);
  BOOST_TEST_CONTEXT(text.str()) {
    BOOST_TEST(distance(outputs.values, want_outputs.values) < 1e-12);
    BOOST_TEST(distance(weight_gradient.values, want_weights) < 1e-12);
    BOOST_TEST(distance(bias_gradient, want_biases) < 1e-12);
    BOOST_TEST(distance(gradient.values, want_gradient) < 1e-12);
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(convolutions_and_their_gradients_are_those_of_the_definition) {
  std::mt19937 random(3);
  for (int i = 0; i < 60; ++i) check_convolution(random);
}

BOOST_AUTO_TEST_CASE(max_pooling_takes_the_largest_and_gives_its_gradient_to_the_first_of_them) {
  std::mt19937 random(4);
  for (std::size_t height = 1; height < 8; ++height) {
    for (std::size_t width = 1; width < 12; ++width) {
      Random inputs(random, 2, 3, height, width), outputs(random, 2, 3, height / 2, width / 2);
      for (double& value : inputs.values) value = std::max(value, 0.0);  // many are equal
      const Random errors(random, 2, 3, height / 2, width / 2);
      std::vector<double> want(outputs.values.size()), want_gradient(inputs.values.size());
      for (std::size_t k = 0; k < want.size(); ++k) {
        const std::size_t plane = k / (height / 2 * (width / 2));
        const std::size_t y = k / (width / 2) % (height / 2), x = k % (width / 2);
        const std::size_t corner = (plane * height + 2 * y) * width + 2 * x;
        std::size_t largest = corner;
        for (const std::size_t other : {corner + 1, corner + width, corner + width + 1})
          if (inputs.values[other] > inputs.values[largest]) largest = other;
        want[k] = inputs.values[largest];
        want_gradient[largest] = errors.values[k];
      }
      max_pool::forward(inputs.view, outputs.view);
      BOOST_TEST((outputs.values == want), height << " x " << width);
      max_pool::backward(inputs.view, errors.view);
      BOOST_TEST((inputs.values == want_gradient), height << " x " << width << ", backward");
    }
  }
}

BOOST_AUTO_TEST_CASE(max_pooling_hides_no_nan) {
  for (std::size_t place = 0; place < 4; ++place) {
    std::vector<double> pixels{1, 2, 3, 4}, largest(1);
    pixels[place] = std::numeric_limits<double>::quiet_NaN();
    max_pool::forward(HostView<double, 1, 1, 2, 2>(pixels.data()),
                      HostView<double, 1, 1, 1, 1>(largest.data()));
    BOOST_TEST(std::isnan(largest[0]));
  }
}

BOOST_AUTO_TEST_SUITE_END()
