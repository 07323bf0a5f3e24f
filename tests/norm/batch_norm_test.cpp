// SPDX-License-Identifier: Apache-2.0
// Norms on the host against plain loops over doubles: all element types, shapes and fusions.
#include "lockstep/detail/norm/batch_norm.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "norm/held.hpp"

BOOST_AUTO_TEST_SUITE(norms)

namespace {

using namespace norm_test;
using detail::Fusion;

/// Parameters of 16-bit activations are of 16 bits too in one of the two types.
template <class T>
using WeightOf = std::conditional_t<std::is_same_v<T, BFloat16>, float, T>;
template <class T>
using Model = Normed<BatchNorm<"bn1", dynamic, WeightOf<T>>>;

/// By how much results may differ from exact ones, in units of the largest.
template <class T>
constexpr double tolerance = std::is_same_v<T, double>  ? 1e-12
                             : std::is_same_v<T, float> ? 4e-6
                             : std::is_same_v<T, Half>  ? 2e-3
                                                        : 1.2e-2;

template <class T>
std::vector<T> narrowed(const Numbers& numbers) {
  std::vector<T> result(numbers.values.size());
  std::ranges::transform(numbers.values, result.begin(), narrow<T>);
  return result;
}

/// The worst difference, where one of size 1 or of the largest number is 1.
double worst(const auto& have, const std::vector<double>& want) {
  BOOST_TEST_REQUIRE(have.size() == want.size());
  double difference = 0;
  double largest = 1;
  for (std::size_t i = 0; i != want.size(); ++i) {
    const double apart = std::abs(wide(have[i]) - want[i]);
    difference = apart <= difference ? difference : apart;  // a NaN stays
    largest = std::max(largest, std::abs(want[i]));
  }
  return difference / largest;
}
template <class View>
std::vector<double> numbers_of(const View& view) {
  std::vector<double> result;
  for (std::size_t i = 0; i != view.size(); ++i) result.push_back(wide(view.data_handle()[i]));
  return result;
}

/// Activations as a view of rank 2, or 4.
template <bool HasPositions, class T>
auto view_of(std::vector<T>& values, const Numbers& like) {
  if constexpr (HasPositions) {
    const std::size_t height = like.positions % 3 == 0 ? 3 : 1;
    return HostView<T, dynamic, dynamic, dynamic, dynamic>(
        values.data(), like.samples, like.channels, height, like.positions / height);
  } else {
    return HostView<T, dynamic, dynamic>(values.data(), like.samples, like.channels);
  }
}

/// One forward and backward pass of random numbers against plain loops.
template <Fusion Fused, bool HasPositions, class T>
void compare(std::size_t samples, std::size_t channels, std::size_t positions,
             RandomStream& random) {
  const Numbers x = random_numbers<T>(samples, channels, positions, random);
  const Numbers residual = random_numbers<T>(samples, channels, positions, random);
  const Numbers dy = random_numbers<T>(samples, channels, positions, random);
  Held<Model<T>> held({channels, {}});
  std::vector<double> weight(channels), bias(channels);
  for (std::size_t c = 0; c != channels; ++c) {
    held.parameter("bn1.weight"_p)(c) = narrow<WeightOf<T>>(random.uniform(0.5, 1.5));
    held.parameter("bn1.bias"_p)(c) = narrow<WeightOf<T>>(random.uniform(-1.0, 1.0));
    weight[c] = wide(held.step.param("bn1.weight"_p)(c));
    bias[c] = wide(held.step.param("bn1.bias"_p)(c));
  }

  std::vector<T> xs = narrowed<T>(x), residuals = narrowed<T>(residual), dys = narrowed<T>(dy);
  std::vector<T> ys(xs.size()), dresiduals(xs.size());
  const auto at = [&](std::vector<T>& values) { return view_of<HasPositions>(values, x); };
  auto& norm = held.model.norm;
  if constexpr (Fused == Fusion::none) {
    norm.forward(held.step, at(xs), at(ys));
    norm.backward(held.step, at(xs), at(dys), at(dys));
  } else if constexpr (Fused == Fusion::relu) {
    norm.forward_relu(held.step, at(xs), at(ys));
    norm.backward_relu(held.step, at(xs), at(dys), at(dys));
  } else {
    norm.forward_add_relu(held.step, at(xs), at(residuals), at(ys));
    norm.backward_add_relu(held.step, at(xs), at(ys), at(dys), at(dys), at(dresiduals));
  }

  PlainNorm plain;
  const Numbers normal = plain.normal(x);
  Numbers y = x.like();
  Numbers g = dy;
  for (std::size_t n = 0; n != samples; ++n) {
    for (std::size_t c = 0; c != channels; ++c) {
      for (std::size_t p = 0; p != positions; ++p) {
        double& out = y.at(n, c, p);
        out = normal.at(n, c, p) * weight[c] + bias[c];
        if (Fused == Fusion::add_relu) out += residual.at(n, c, p);
        if (Fused != Fusion::none) out = std::max(out, 0.0);
      }
    }
  }
  if constexpr (Fused != Fusion::none) {  // what forward let pass is what it stored
    for (std::size_t i = 0; i != ys.size(); ++i) g.values[i] = wide(ys[i]) > 0 ? dy.values[i] : 0;
  }
  const Numbers dx = plain.backward(normal, g, weight);
  constexpr double most = tolerance<T>;
  BOOST_TEST(worst(ys, y.values) <= most);
  BOOST_TEST(worst(dys, dx.values) <= most);
  if constexpr (Fused == Fusion::add_relu) BOOST_TEST(worst(dresiduals, g.values) == 0);
  const auto count = static_cast<double>(x.count());
  const double sums = most * std::sqrt(count);  // of so many numbers of size 1
  BOOST_TEST(worst(numbers_of(held.step.grad("bn1.weight"_p)), plain.dweight) <= sums);
  BOOST_TEST(worst(numbers_of(held.step.grad("bn1.bias"_p)), plain.dbias) <= sums);

  std::vector<double> mean = plain.mean, variance = plain.variance;
  for (double& value : mean) value *= 0.1;
  for (double& value : variance) value = 0.9 + 0.1 * value * count / (count - 1);
  const double single = std::is_same_v<T, double> ? most : 1e-6;  // statistics have 32 bits
  BOOST_TEST(worst(numbers_of(held.step.buffer("bn1.running_mean"_p)), mean) <= single);
  BOOST_TEST(worst(numbers_of(held.step.buffer("bn1.running_var"_p)), variance) <= single);
  BOOST_TEST(held.step.buffer("bn1.num_batches_tracked"_p)() == 1);
}

/// Rows and positions of all kinds: fewer and more than a register, a tile or a piece has.
template <Fusion Fused, class T>
void compare_shapes(std::uint64_t seed) {
  RandomStream random(Seed{seed});
  for (const auto& [samples, channels] :
       {std::pair<std::size_t, std::size_t>{2, 1}, {3, 7}, {5, 16}, {33, 5}, {70, 300}, {260, 3}}) {
    BOOST_TEST_CONTEXT(samples << " rows of " << channels)
    compare<Fused, false, T>(samples, channels, 1, random);
  }
  for (const auto& [samples, channels, positions] :
       {std::array<std::size_t, 3>{1, 1, 2}, {2, 3, 4}, {3, 5, 49}, {4, 2, 16}, {2, 3, 4500}}) {
    BOOST_TEST_CONTEXT(samples << " samples of " << channels << " times " << positions)
    compare<Fused, true, T>(samples, channels, positions, random);
  }
}

struct Block {
  using Norm1 = BatchNorm<"layer1.0.bn1", 64>;
  using Norm2 = LayerNorm<"ln", 8, double>;
  using Parameters = ParameterList<Parameter<"conv.weight", float, 64, 3, 3, 3>, Norm1, Norm2>;
  using Buffers = BufferList<Norm1, Norm2, Buffer<"other", float, 3>>;
};

/// It gives one tensor a value, and knows nothing of its norm.
struct Own {
  using Norm1 = BatchNorm<"bn1", 3, Half>;
  using Parameters = ParameterList<Parameter<"fc.weight", float, 3>, Norm1>;
  using Buffers = BufferList<Norm1>;
  static void initialize(auto& initial) { initial.param("fc.weight"_p)(2) = 5; }
};

}  // namespace

BOOST_AUTO_TEST_CASE(a_norm_stands_in_both_lists_under_pytorchs_names) {
  constexpr const auto& parameters = detail::parameter_table<Block>;
  constexpr const auto& buffers = detail::buffer_table<Block>;
  const auto names = [](const auto& table) {
    std::vector<std::string_view> all;
    for (std::size_t i = 0; i != table.size(); ++i) all.push_back(table.name(i));
    return all;
  };
  BOOST_TEST((names(parameters) ==
              std::vector<std::string_view>{"conv.weight", "layer1.0.bn1.weight",
                                            "layer1.0.bn1.bias", "ln.weight", "ln.bias"}));
  BOOST_TEST((names(buffers) ==
              std::vector<std::string_view>{"layer1.0.bn1.running_mean", "layer1.0.bn1.running_var",
                                            "layer1.0.bn1.num_batches_tracked", "other"}));
  BOOST_TEST((buffers.infos[2] == detail::TensorInfo{ElementKind::i64, 0, {}}));
  BOOST_TEST((parameters.infos[3].element == ElementKind::f64));
  BOOST_TEST((parameters.infos[3].starts_at_one && !parameters.infos[4].starts_at_one));
}

BOOST_AUTO_TEST_CASE(norms_start_as_pytorchs_do_whatever_the_model_initializes) {
  Held<Own> held(Own{});
  const auto all = [](const auto& view, double value) {
    for (std::size_t i = 0; i != view.size(); ++i) {
      if (wide(view.data_handle()[i]) != value) return false;
    }
    return true;
  };
  BOOST_TEST(held.step.param("fc.weight"_p)(2) == 5);
  BOOST_TEST(held.step.param("fc.weight"_p)(1) == 0);
  BOOST_TEST(all(held.step.param("bn1.weight"_p), 1));
  BOOST_TEST(all(held.step.param("bn1.bias"_p), 0));
  BOOST_TEST(all(held.step.buffer("bn1.running_mean"_p), 0));
  BOOST_TEST(all(held.step.buffer("bn1.running_var"_p), 1));
  BOOST_TEST(held.step.buffer("bn1.num_batches_tracked"_p)() == 0);
  // 16-bit weights have statistics of 32 bits.
  static_assert(std::is_same_v<decltype(held.step.buffer("bn1.running_var"_p))::value_type, float>);
}

BOOST_AUTO_TEST_CASE(double_norms_are_those_of_plain_loops) {
  compare_shapes<Fusion::none, double>(1);
  compare_shapes<Fusion::relu, double>(2);
  compare_shapes<Fusion::add_relu, double>(3);
}

BOOST_AUTO_TEST_CASE(float_norms_are_those_of_plain_loops) {
  compare_shapes<Fusion::none, float>(4);
  compare_shapes<Fusion::relu, float>(5);
  compare_shapes<Fusion::add_relu, float>(6);
}

BOOST_AUTO_TEST_CASE(half_norms_are_those_of_plain_loops) {
  compare_shapes<Fusion::relu, Half>(7);
  compare_shapes<Fusion::add_relu, Half>(8);
}

BOOST_AUTO_TEST_CASE(bfloat16_norms_are_those_of_plain_loops) {
  compare_shapes<Fusion::relu, BFloat16>(9);
  compare_shapes<Fusion::add_relu, BFloat16>(10);
}

// The mean of the values is ten thousand times their deviation, of which float has seven digits.
BOOST_AUTO_TEST_CASE(large_means_cost_no_digits) {
  RandomStream random(Seed{11});
  for (const std::size_t positions : {std::size_t{1}, std::size_t{50}}) {
    Numbers x{400, 8, positions, std::vector<double>(400 * 8 * positions)};
    for (double& value : x.values) value = static_cast<float>(1e4 + random.normal());
    Numbers dy = x.like();
    for (double& value : dy.values) value = static_cast<float>(random.normal());
    Held<Model<float>> held({8, {}});
    std::vector<float> xs = narrowed<float>(x), dys = narrowed<float>(dy), ys(xs.size());
    const HostView<float, dynamic, 8, dynamic> in(xs.data(), 400, positions);
    const HostView<float, dynamic, 8, dynamic> out(ys.data(), 400, positions);
    const HostView<float, dynamic, 8, dynamic> gradient(dys.data(), 400, positions);
    held.model.norm.forward(held.step, in, out);
    held.model.norm.backward(held.step, in, gradient, gradient);
    PlainNorm plain;
    const Numbers normal = plain.normal(x);
    BOOST_TEST(worst(ys, normal.values) <= 1e-5);
    BOOST_TEST(worst(dys, plain.backward(normal, dy, std::vector<double>(8, 1)).values) <= 1e-5);
    for (std::size_t c = 0; c != 8; ++c) {
      const double count = static_cast<double>(x.count());
      BOOST_TEST(std::abs(held.step.buffer("bn1.running_var"_p)(c) -
                          (0.9 + 0.1 * plain.variance[c] * count / (count - 1))) <= 1e-6);
    }
  }
}

BOOST_AUTO_TEST_CASE(evaluation_normalises_by_running_statistics_and_changes_none) {
  Held<Model<float>> held({2, {}});
  held.step.buffer("bn1.running_mean"_p)(0) = 3;
  held.step.buffer("bn1.running_var"_p)(1) = 4;
  std::vector<float> x{5, 5, 3, 1}, y(4);
  const HostView<float, 2, 2> in(x.data()), out(y.data());
  held.model.norm.forward_relu(held.evaluation, in, out);
  BOOST_TEST(y[0] == 2.f, boost::test_tools::tolerance(1e-5f));
  BOOST_TEST(y[1] == 2.5f, boost::test_tools::tolerance(1e-5f));
  BOOST_TEST(y[2] == 0);
  BOOST_TEST(y[3] == 0.5f, boost::test_tools::tolerance(1e-5f));
  BOOST_TEST(held.step.buffer("bn1.num_batches_tracked"_p)() == 0);
  BOOST_TEST(held.step.buffer("bn1.running_mean"_p)(0) == 3);
}

BOOST_AUTO_TEST_CASE(options_are_pytorchs) {
  using Layer = BatchNorm<"bn1", dynamic, double>;
  std::vector<double> x{0, 2}, y(2);
  const HostView<double, 2, 1> in(x.data()), out(y.data());
  Held<Normed<Layer>> held({1, Layer{{.eps = 3, .momentum = 0.25}}});
  held.model.norm.forward(held.step, in, out);
  BOOST_TEST(y[1] == 0.5);  // 1 / sqrt(1 + 3)
  BOOST_TEST(held.step.buffer("bn1.running_mean"_p)(0) == 0.25);
  BOOST_TEST(held.step.buffer("bn1.running_var"_p)(0) == 0.75 + 0.25 * 2);

  Held<Normed<Layer>> averaged({1, Layer{{.eps = 1e-5, .momentum = cumulative_average}}});
  for (const double second : {2.0, 4.0, 6.0}) {
    x[1] = second;
    averaged.model.norm.forward(averaged.step, in, out);
  }
  BOOST_TEST(averaged.step.buffer("bn1.running_mean"_p)(0) == 2,
             boost::test_tools::tolerance(1e-14));  // of 1, 2 and 3
  BOOST_TEST(averaged.step.buffer("bn1.num_batches_tracked"_p)() == 3);
}

BOOST_AUTO_TEST_CASE(what_a_norm_cannot_train_on_is_rejected_in_words) {
  Held<Model<double>> held({3, {}});
  auto& norm = held.model.norm;
  std::vector<double> x(12), y(12);
  const auto says = [&](const auto& in, const auto& out) -> std::string {
    try {
      norm.forward(held.step, in, out);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  using Rows = HostView<double, dynamic, dynamic>;
  BOOST_TEST(says(Rows(x.data(), 1, 3), Rows(y.data(), 1, 3))
                 .find("bn1: expected more than 1 value per channel") != std::string::npos);
  BOOST_TEST(says(Rows(x.data(), 3, 4), Rows(y.data(), 3, 4))
                 .find("has 3 features, and was given a tensor with 4") != std::string::npos);
  BOOST_TEST(says(Rows(x.data(), 4, 3), Rows(y.data(), 3, 3)).find("different extents") !=
             std::string::npos);
  const Rows rows(x.data(), 4, 3);
  BOOST_TEST(says(rows, rows).find("bn1: x and y of the norm are the same memory; give y") !=
             std::string::npos);
  norm.forward(held.evaluation, rows, rows);  // which has no backward
  BOOST_TEST(held.step.buffer("bn1.num_batches_tracked"_p)() == 0);
  const auto backward_says = [&]() -> std::string {
    const Rows dy(y.data(), 4, 3);
    try {
      norm.backward_add_relu(held.step, rows, rows, dy, dy, dy);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  BOOST_TEST(backward_says().find("bn1: backward of the norm has no statistics") !=
             std::string::npos);
  BOOST_TEST(says(rows, Rows(y.data(), 4, 3)) == "");
  BOOST_TEST(backward_says().find("dx and dresidual of the norm are the same memory") !=
             std::string::npos);
  norm.forward(held.evaluation, rows, rows);
  BOOST_TEST(backward_says().find("has no statistics") != std::string::npos);
  // An empty batch is no batch, and its gradients are zero.
  held.step.grad("bn1.weight"_p)(1) = 7;
  BOOST_TEST(says(Rows(x.data(), 0, 3), Rows(y.data(), 0, 3)) == "");
  norm.backward(held.step, Rows(x.data(), 0, 3), Rows(y.data(), 0, 3), Rows(y.data(), 0, 3));
  BOOST_TEST(held.step.buffer("bn1.num_batches_tracked"_p)() == 1);
  BOOST_TEST(held.step.buffer("bn1.running_var"_p)(0) == 0.9);
  BOOST_TEST(held.step.grad("bn1.weight"_p)(1) == 0);
}

// A value that rounds to zero in 16 bits was not let pass; a NaN is not hidden.
BOOST_AUTO_TEST_CASE(the_mask_of_a_relu_is_that_of_stored_values) {
  Held<Model<Half>> held({1, {}});
  held.parameter("bn1.weight"_p)(0) = Half(0.f);
  held.parameter("bn1.bias"_p)(0) =
      std::bit_cast<Half>(std::uint16_t{1});  // the smallest, which is stored as it is
  std::vector<Half> x{Half(1.f), Half(-1.f), Half(2.f)}, y(3), dy(3, Half(1.f)), dx(3);
  const HostView<Half, 3, 1> in(x.data()), out(y.data()), above(dy.data()), below(dx.data());
  held.model.norm.forward_relu(held.step, in, out);
  held.model.norm.backward_relu(held.step, in, above, below);
  BOOST_TEST(wide(held.step.grad("bn1.bias"_p)(0)) == 3);
  // Between zero and half of the smallest: float has it, Half has not.
  held.parameter("bn1.weight"_p)(0) = std::bit_cast<Half>(std::uint16_t{1});
  held.parameter("bn1.bias"_p)(0) = Half(0.f);
  x = {Half(0.25f), Half(-1.f), Half(0.75f)};
  held.model.norm.forward_relu(held.step, in, out);
  held.model.norm.backward_relu(held.step, in, above, below);
  double passed = 0;
  for (const Half value : y) passed += wide(value) > 0 ? 1 : 0;
  BOOST_TEST(passed == 1);
  BOOST_TEST(wide(held.step.grad("bn1.bias"_p)(0)) == passed);

  x[0] = Half(NAN);
  held.model.norm.forward_relu(held.step, in, out);
  BOOST_TEST(std::isnan(wide(y[1])));
}

BOOST_AUTO_TEST_CASE(the_copy_of_a_layer_begins_with_nothing) {
  Held<Model<double>> held({2, {}});
  std::vector<double> x{1, 2, 3, 5}, y(4), dx(4);
  const HostView<double, 2, 2> in(x.data()), out(y.data()), below(dx.data());
  held.model.norm.forward(held.step, in, out);
  auto copy = held.model.norm;
  std::vector<double> other{7, 1, 9, 4}, ignored(4);
  copy.forward(held.step, HostView<double, 2, 2>(other.data()),
               HostView<double, 2, 2>(ignored.data()));
  held.model.norm.backward(held.step, in, in, below);
  // x is its own output's gradient: what is left of it is nearly nothing.
  for (const double value : dx) BOOST_TEST(std::abs(value) < 1e-4);
}

// Any division of values among ranks gives the moments of all.
BOOST_AUTO_TEST_CASE(packets_of_ranks_merge_to_those_of_all_values) {
  RandomStream random(Seed{13});
  for (const std::size_t world : {1u, 2u, 3u, 5u, 8u}) {
    std::vector<double> all[2];
    std::vector<double> packets;
    for (std::size_t rank = 0; rank != world; ++rank) {
      const std::size_t count = rank == 1 ? 0 : 1 + random() % 5;
      std::vector<double> values[2];
      for (std::size_t c = 0; c != 2; ++c) {
        for (std::size_t i = 0; i != count; ++i)
          values[c].push_back(1e6 * (c + 1.0) + random.normal());
        all[c].insert(all[c].end(), values[c].begin(), values[c].end());
      }
      const detail::Moments own[] = {detail::run_moments(values[0].data(), count),
                                     detail::run_moments(values[1].data(), count)};
      packets.insert(packets.end(),
                     {own[0].mean, own[1].mean, own[0].m2, own[1].m2, static_cast<double>(count)});
    }
    BOOST_TEST(detail::count_of_packets(packets.data(), world, 2) ==
               static_cast<double>(all[0].size()));
    for (std::size_t c = 0; c != 2; ++c) {
      const detail::Moments merged = detail::merged_packets(packets.data(), world, 2, c);
      double mean = 0, m2 = 0;
      for (const double value : all[c]) mean += value / static_cast<double>(all[c].size());
      for (const double value : all[c]) m2 += (value - mean) * (value - mean);
      BOOST_TEST(std::abs(merged.mean - mean) <= 1e-9);
      BOOST_TEST(std::abs(merged.m2 - m2) <= 1e-7);
    }
  }
}

namespace {

/// A layer norm is a batch norm whose samples are features: the plain loops of the transposed.
template <class T>
void compare_layer_norm(std::size_t rows, std::size_t features, RandomStream& random) {
  const Numbers x = random_numbers<T>(1, rows, features, random);
  Numbers dy = random_numbers<T>(1, rows, features, random);
  Held<Normed<LayerNorm<"ln", dynamic, WeightOf<T>>>> held({features, {}});
  std::vector<double> weight(features), bias(features);
  for (std::size_t i = 0; i != features; ++i) {
    held.parameter("ln.weight"_p)(i) = narrow<WeightOf<T>>(random.uniform(0.5, 1.5));
    held.parameter("ln.bias"_p)(i) = narrow<WeightOf<T>>(random.uniform(-1.0, 1.0));
    weight[i] = wide(held.step.param("ln.weight"_p)(i));
    bias[i] = wide(held.step.param("ln.bias"_p)(i));
  }
  std::vector<T> xs = narrowed<T>(x), ys(xs.size()), dys = narrowed<T>(dy), evaluated(xs.size());
  const auto at = [&](std::vector<T>& values) {
    return HostView<T, 1, dynamic, dynamic>(values.data(), 1, rows, features);
  };
  held.model.norm.forward(held.step, at(xs), at(ys));
  held.model.norm.forward(held.evaluation, at(xs), at(evaluated));
  held.model.norm.backward(held.step, at(xs), at(dys), at(dys));

  PlainNorm plain;
  const Numbers normal = plain.normal(x);
  Numbers y = x.like();
  std::vector<double> dweight(features), dbias(features);
  for (std::size_t row = 0; row != rows; ++row) {
    for (std::size_t i = 0; i != features; ++i) {
      y.at(0, row, i) = normal.at(0, row, i) * weight[i] + bias[i];
      dweight[i] += dy.at(0, row, i) * normal.at(0, row, i);
      dbias[i] += dy.at(0, row, i);
      dy.at(0, row, i) *= weight[i];
    }
  }
  const Numbers dx = plain.backward(normal, dy, std::vector<double>(rows, 1));
  constexpr double most = tolerance<T>;
  BOOST_TEST(worst(ys, y.values) <= most);
  BOOST_TEST(worst(evaluated, y.values) <= most);
  BOOST_TEST(worst(dys, dx.values) <= most);
  BOOST_TEST(worst(numbers_of(held.step.grad("ln.weight"_p)), dweight) <= most);
  BOOST_TEST(worst(numbers_of(held.step.grad("ln.bias"_p)), dbias) <= most);
}

}  // namespace

BOOST_AUTO_TEST_CASE(layer_norms_are_those_of_plain_loops) {
  RandomStream random(Seed{14});
  for (const auto& [rows, features] : {std::pair<std::size_t, std::size_t>{1, 2},
                                       {3, 7},
                                       {70, 33},
                                       {130, 16},
                                       {2, 5000},
                                       {0, 4}}) {
    BOOST_TEST_CONTEXT(rows << " rows of " << features) {
      compare_layer_norm<double>(rows, features, random);
      compare_layer_norm<float>(rows, features, random);
      compare_layer_norm<Half>(rows, features, random);
      compare_layer_norm<BFloat16>(rows, features, random);
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
