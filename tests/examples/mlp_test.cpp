// SPDX-License-Identifier: Apache-2.0
#include "mlp.hpp"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

BOOST_AUTO_TEST_SUITE(mlp)

namespace {

template <class T>
struct Samples {
  std::vector<T> inputs;
  std::vector<std::uint8_t> labels;
  std::size_t size() const { return labels.size(); }
};

/// A bare step that notes what is ready, and what the gradient was then.
template <class Model>
struct NotingStep : detail::BareStep<Model> {
  using detail::BareStep<Model>::BareStep;
  std::vector<std::pair<std::string, std::vector<double>>> noted;

  void ready(auto key) {
    const auto view = this->grad(key);
    noted.emplace_back(std::string_view(decltype(key)::name),
                       std::vector<double>(view.data_handle(), view.data_handle() + view.size()));
  }
};

/// A model on random parameters and a batch, both the same in every run.
template <class T, std::size_t Inputs, std::size_t Hidden, std::size_t Classes>
struct Fixture {
  using Model = Mlp<T, Inputs, Hidden, Classes>;
  static constexpr std::size_t bytes = detail::Layout<Model>::plan().bytes;

  Model model;
  HostArena parameters{bytes};
  HostArena gradients{bytes};
  NotingStep<Model> step{model, {parameters.data(), gradients.data()}};
  std::mt19937 random{7};

  Fixture() {
    std::uniform_real_distribution<T> uniform(T(-0.5), T(0.5));
    for (std::size_t i = 0; i < bytes / sizeof(T); ++i) {
      reinterpret_cast<T*>(parameters.data())[i] = uniform(random);
    }
  }

  Samples<T> batch_of(std::size_t rows) {
    std::normal_distribution<T> normal;
    Samples<T> batch{std::vector<T>(rows * Inputs), std::vector<std::uint8_t>(rows)};
    for (T& x : batch.inputs) x = normal(random);
    for (auto& label : batch.labels) label = static_cast<std::uint8_t>(random() % Classes);
    return batch;
  }

  void backward(const Samples<T>& batch) {
    std::fill_n(reinterpret_cast<T*>(gradients.data()), bytes / sizeof(T),
                std::numeric_limits<T>::quiet_NaN());
    step.noted.clear();
    model.backward(step, batch);
  }

  /// Where the optimizer writes a parameter.
  T* written(auto key) { return const_cast<T*>(step.param(key).data_handle()); }
};

using Small = Fixture<double, 7, 5, 3>;
using Wide = Fixture<double, 40, 33, 10>;  // beyond what Eigen multiplies without blocking

static_assert(
    detail::require_model<Small::Model, detail::BareStep<Small::Model>, Samples<double>>());

/// One layer and the loss as they are defined, in double.
std::vector<double> layer(const std::vector<double>& x, auto weight, auto bias) {
  std::vector<double> y(bias.extent(0));
  for (std::size_t i = 0; i < y.size(); ++i) {
    y[i] = bias(i);
    for (std::size_t j = 0; j < x.size(); ++j) y[i] += static_cast<double>(weight(i, j)) * x[j];
  }
  return y;
}

struct Expected {
  double loss = 0;  // of all rows
  double correct = 0;
};

template <class T>
Expected expected(const auto& step, const Samples<T>& batch) {
  Expected total;
  const std::size_t columns = batch.inputs.size() / batch.size();
  const auto relu = [](std::vector<double> y) {
    for (double& v : y) v = std::max(v, 0.0);
    return y;
  };
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const auto row = batch.inputs.begin() + static_cast<std::ptrdiff_t>(i * columns);
    std::vector<double> x(row, row + static_cast<std::ptrdiff_t>(columns));
    x = relu(layer(x, step.param("fc1.weight"_p), step.param("fc1.bias"_p)));
    x = relu(layer(x, step.param("fc2.weight"_p), step.param("fc2.bias"_p)));
    x = layer(x, step.param("fc3.weight"_p), step.param("fc3.bias"_p));
    double sum = 0;
    for (const double v : x) sum += std::exp(v);
    total.loss += std::log(sum) - x[batch.labels[i]];
    total.correct += std::max_element(x.begin(), x.end()) - x.begin() == batch.labels[i];
  }
  return total;
}

/// Every stride-th element of one gradient against the slope of the loss.
void compare_with_slope(auto& fixture, const auto& batch, auto key, std::size_t stride) {
  constexpr double h = 1e-5;
  const auto gradient = fixture.step.grad(key);
  double* const parameter = fixture.written(key);
  for (std::size_t i = 0; i < gradient.size(); i += stride) {
    const double before = parameter[i];
    parameter[i] = before + h;
    const double above = fixture.model.forward(fixture.step, batch);
    parameter[i] = before - h;
    const double below = fixture.model.forward(fixture.step, batch);
    parameter[i] = before;
    BOOST_TEST_CONTEXT(std::string_view(decltype(key)::name) << "[" << i << "]") {
      BOOST_TEST(std::abs(gradient.data_handle()[i] - (above - below) / (2 * h)) < 1e-8);
    }
  }
}

void compare_all_with_slopes(auto& fixture, const auto& batch, std::size_t stride) {
  compare_with_slope(fixture, batch, "fc1.weight"_p, stride);
  compare_with_slope(fixture, batch, "fc1.bias"_p, stride);
  compare_with_slope(fixture, batch, "fc2.weight"_p, stride);
  compare_with_slope(fixture, batch, "fc2.bias"_p, stride);
  compare_with_slope(fixture, batch, "fc3.weight"_p, stride);
  compare_with_slope(fixture, batch, "fc3.bias"_p, stride);
}

struct PlainTally {
  std::map<std::string, std::pair<double, std::size_t>> sums;
  void add(const char* name, double sum, std::size_t count) {
    sums[name].first += sum;
    sums[name].second += count;
  }
};

}  // namespace

BOOST_AUTO_TEST_CASE(gradients_are_the_slopes_of_the_loss_whatever_was_there_before) {
  Small small;
  for (const std::size_t rows : {33, 1, 6}) {  // the same buffers, smaller and larger again
    const auto batch = small.batch_of(rows);
    small.model.forward(small.step, batch);
    small.backward(batch);
    compare_all_with_slopes(small, batch, 1);
  }
  Wide wide;
  for (const std::size_t rows : {6, 33}) {
    const auto batch = wide.batch_of(rows);
    wide.model.forward(wide.step, batch);
    wide.backward(batch);
    compare_all_with_slopes(wide, batch, 31);
  }
}

BOOST_AUTO_TEST_CASE(losses_and_right_answers_are_those_of_the_definition) {
  const auto compare = [](auto fixture, double tolerance) {
    for (const std::size_t rows : {1, 6, 33}) {
      const auto batch = fixture.batch_of(rows);
      const Expected total = expected(fixture.step, batch);
      const double loss = fixture.model.forward(fixture.step, batch);
      BOOST_TEST(std::abs(loss - total.loss / static_cast<double>(rows)) < tolerance);

      PlainTally tally;
      fixture.model.evaluate(fixture.step, batch, tally);
      fixture.model.evaluate(fixture.step, batch, tally);
      const auto n = static_cast<double>(rows);
      BOOST_TEST(std::abs(tally.sums["loss"].first - 2 * total.loss) < n * tolerance);
      BOOST_TEST(tally.sums["accuracy"].first == 2 * total.correct);
      BOOST_TEST(tally.sums["loss"].second == 2 * rows);
      BOOST_TEST(tally.sums["accuracy"].second == 2 * rows);
    }
  };
  compare(Small{}, 1e-13);
  compare(Wide{}, 1e-13);
  compare(Fixture<float, 40, 33, 10>{}, 1e-5);
}

BOOST_AUTO_TEST_CASE(each_gradient_is_ready_once_complete_and_the_last_layer_is_first) {
  Small small;
  const auto batch = small.batch_of(6);
  small.model.forward(small.step, batch);
  small.backward(batch);
  const std::vector<std::string> order = {"fc3.bias",   "fc3.weight", "fc2.bias",
                                          "fc2.weight", "fc1.bias",   "fc1.weight"};
  const auto noted = small.step.noted;
  BOOST_TEST_REQUIRE(noted.size() == order.size());
  for (std::size_t i = 0; i < order.size(); ++i) BOOST_TEST(noted[i].first == order[i]);

  const auto unchanged = [&](std::size_t i, auto key) {
    const auto view = small.step.grad(key);
    BOOST_TEST(std::equal(noted[i].second.begin(), noted[i].second.end(), view.data_handle(),
                          view.data_handle() + view.size()));
  };
  unchanged(0, "fc3.bias"_p);
  unchanged(1, "fc3.weight"_p);
  unchanged(2, "fc2.bias"_p);
  unchanged(3, "fc2.weight"_p);
  unchanged(4, "fc1.bias"_p);
  unchanged(5, "fc1.weight"_p);
}

BOOST_AUTO_TEST_CASE(huge_outputs_overflow_nothing_and_nan_is_not_hidden) {
  Small small;
  auto batch = small.batch_of(6);
  small.written("fc3.bias"_p)[0] = 1e4;
  BOOST_TEST(std::isfinite(small.model.forward(small.step, batch)));
  batch.inputs[3] = std::numeric_limits<double>::quiet_NaN();
  BOOST_TEST(std::isnan(small.model.forward(small.step, batch)));
}

BOOST_AUTO_TEST_CASE(a_label_beyond_the_classes_is_an_error) {
  Small small;
  auto batch = small.batch_of(6);
  batch.labels[5] = 3;
  BOOST_CHECK_THROW(small.model.forward(small.step, batch), std::out_of_range);
}

BOOST_AUTO_TEST_SUITE_END()
