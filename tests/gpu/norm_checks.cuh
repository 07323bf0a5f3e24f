// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Norms in a GPU's memory against plain loops in double. For a GPU, and for one that the
/// host plays.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/device/cuda/memory.cuh"
#include "lockstep/detail/device/cuda/runtime.cuh"
#include "lockstep/detail/norm/device_layer_norm.cuh"
#include "lockstep/detail/norm/device_norm.cuh"

namespace norm_checks {

using namespace lockstep;
using detail::Fusion;
using detail::NormShape;
using Doubles = std::vector<double>;

template <class T>
double number(T value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<double>(value);
  } else {
    return static_cast<double>(static_cast<detail::Accumulator<T>>(value));
  }
}
template <class T>
Doubles numbers(const std::vector<T>& values) {
  Doubles all(values.size());
  std::ranges::transform(values, all.begin(), [](T value) { return number(value); });
  return all;
}

/// The memory of all arrays of a check, which one copy fills and one copy reads: beside other
/// programs on the same GPU each wait of the host takes as long as their turns, and a suite that
/// waits for every array takes minutes instead of seconds.
class Memory {
 public:
  /// Room for `bytes` that begin `offset` bytes behind a multiple of 256. Returns the place.
  std::size_t take(std::size_t bytes, std::size_t offset) {
    const std::size_t place = (host_.size() + 255) / 256 * 256 + offset;
    host_.resize(place + bytes);
    return place;
  }
  /// What the host writes before `upload`, and reads after `download`.
  std::byte* host(std::size_t place) { return host_.data() + place; }
  std::byte* device(std::size_t place) const { return device_->data() + place; }

  /// Nothing is taken from here on. **Stream** in its order.
  void upload(cudaStream_t stream) {
    device_.emplace(host_.size());
    copy(device_->data(), host_.data(), stream);
  }
  /// **Host** blocks until the stream is empty.
  void download(cudaStream_t stream) {
    copy(host_.data(), device_->data(), stream);
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

 private:
  void copy(std::byte* to, const std::byte* from, cudaStream_t stream) const {
    check_cuda(cudaMemcpyAsync(to, from, host_.size(), cudaMemcpyDefault, stream),
               "cudaMemcpyAsync");
  }

  std::vector<std::byte> host_;
  std::optional<DeviceArena> device_;
};

/// Elements in such a memory that begin `offset` elements behind a multiple of 256 bytes, with a
/// fence behind them.
template <class T>
class Array {
 public:
  Array(Memory& memory, std::size_t count, std::size_t offset = 0)
      : Array(memory, std::vector<T>(count), offset) {}
  Array(Memory& memory, std::vector<T> values, std::size_t offset = 0)
      : memory_(&memory),
        count_(values.size()),
        place_(memory.take((count_ + fence) * sizeof(T), offset * sizeof(T))) {
    values.resize(count_ + fence, static_cast<T>(77.0F));
    std::memcpy(memory_->host(place_), values.data(), values.size() * sizeof(T));
  }
  T* data() const { return reinterpret_cast<T*>(memory_->device(place_)); }
  /// What the memory's last `download` has brought.
  std::vector<T> get() const {
    std::vector<T> all(count_ + fence);
    std::memcpy(all.data(), memory_->host(place_), all.size() * sizeof(T));
    const bool untouched =
        std::all_of(all.end() - fence, all.end(), [](T value) { return number(value) == 77; });
    BOOST_TEST(untouched, "something was written behind the end");
    all.resize(count_);
    return all;
  }

 private:
  static constexpr std::size_t fence = 64;
  Memory* memory_;
  std::size_t count_;
  std::size_t place_;
};

/// Empty, or the first number that is further from what is wanted than `tolerance` times its
/// magnitude and one.
inline std::string difference(const Doubles& got, const Doubles& want, double tolerance) {
  if (got.size() != want.size()) return "other sizes";
  for (std::size_t i = 0; i != want.size(); ++i) {
    if (std::isnan(got[i]) && std::isnan(want[i])) continue;
    if (std::abs(got[i] - want[i]) <= tolerance * (1 + std::abs(want[i]))) continue;
    char text[120];
    std::snprintf(text, sizeof text, "number %zu of %zu is %.9g, expected %.9g", i, want.size(),
                  got[i], want[i]);
    return text;
  }
  return {};
}

template <class T>
std::vector<T> random_values(std::mt19937& random, std::size_t count, double mean,
                             double deviation) {
  std::normal_distribution<double> normal(mean, deviation);
  std::vector<T> values(count);
  for (T& value : values)
    value = static_cast<T>(static_cast<detail::Accumulator<T>>(normal(random)));
  return values;
}

/// How far a result may be from the exact one, for numbers about one.
template <class T>
constexpr double rounding() {
  return sizeof(T) == 8 ? 1e-12 : sizeof(T) == 4 ? 4e-5 : std::is_same_v<T, Half> ? 4e-3 : 3e-2;
}

/// A batch norm's statistics and gradients by plain loops, in double. A channel's values are found
/// by `for_each(c, f)`.
struct Expected {
  NormShape shape;
  Doubles x, mean, inverse, variance;

  Expected(const NormShape& shape, Doubles values, double eps)
      : shape(shape),
        x(std::move(values)),
        mean(shape.channels),
        inverse(shape.channels),
        variance(shape.channels) {
    const auto n = static_cast<double>(shape.count());
    for (std::size_t c = 0; c != shape.channels; ++c) {
      for_each(c, [&](std::size_t i) { mean[c] += x[i] / n; });
      double m2 = 0;
      for_each(c, [&](std::size_t i) { m2 += (x[i] - mean[c]) * (x[i] - mean[c]); });
      inverse[c] = 1 / std::sqrt(m2 / n + eps);
      variance[c] = m2 / std::max(n - 1, 1.0);
    }
  }
  template <class F>
  void for_each(std::size_t c, const F& f) const {
    for (std::size_t s = 0; s != shape.samples; ++s) {
      for (std::size_t p = 0; p != shape.positions; ++p)
        f((s * shape.channels + c) * shape.positions + p);
    }
  }
  Doubles outputs(const Doubles& weight, const Doubles& bias, const Doubles* residual,
                  bool relu) const {
    Doubles y(x.size());
    for (std::size_t c = 0; c != shape.channels; ++c) {
      for_each(c, [&](std::size_t i) {
        y[i] = (x[i] - mean[c]) * inverse[c] * weight[c] + bias[c];
        if (residual != nullptr) y[i] += (*residual)[i];
        if (relu && y[i] < 0) y[i] = 0;
      });
    }
    return y;
  }
  struct Gradients {
    Doubles input, weight, bias;
  };
  Gradients gradients(const Doubles& weight, const Doubles& g) const {
    const auto n = static_cast<double>(shape.count());
    Gradients all{Doubles(x.size()), Doubles(shape.channels), Doubles(shape.channels)};
    for (std::size_t c = 0; c != shape.channels; ++c) {
      double sum = 0;
      double product = 0;
      for_each(c, [&](std::size_t i) {
        sum += g[i];
        product += g[i] * (x[i] - mean[c]);
      });
      all.bias[c] = sum;
      all.weight[c] = product * inverse[c];
      for_each(c, [&](std::size_t i) {
        all.input[i] = (g[i] - sum / n - (x[i] - mean[c]) * inverse[c] * inverse[c] * product / n) *
                       weight[c] * inverse[c];
      });
    }
    return all;
  }
};

/// How one case is given its tensors.
struct Course {
  double mean = 0.3;
  double deviation = 1.5;
  std::size_t offset = 0;  // elements behind a multiple of 16 bytes
  std::size_t parts = 1;   // the ranks among which the samples are divided
};

/// Forward and backward of one shape. `parts` layers have parts of the samples each and merge their
/// statistics, as ranks do. Returns what was written, for the comparison of two runs.
template <Fusion F, class T, class W>
Doubles check_batch_norm(const NormShape& whole, const Course& course, unsigned seed) {
  using A = detail::Accumulator<T>;
  std::mt19937 random(seed);
  const BatchNormOptions options{1e-4, seed % 2 == 0 ? 0.2 : cumulative_average};
  const std::size_t channels = whole.channels;
  const auto x = random_values<T>(random, whole.size(), course.mean, course.deviation);
  const auto dy = random_values<T>(random, whole.size(), 0.1, 1);
  const auto residual = random_values<T>(random, whole.size(), 0, 1);
  const auto weight = random_values<W>(random, channels, 1, 0.3);
  const auto bias = random_values<W>(random, channels, 0, 0.5);
  const auto mean = random_values<A>(random, channels, 0, 1);
  const auto variance = std::vector<A>(channels, A{2});
  const Expected expected(whole, numbers(x), options.eps);
  const double tolerance = rounding<T>();
  const bool relu = F != Fusion::none;
  const bool adds = F == Fusion::add_relu;
  // Gradients of weights are sums over many values.
  const double summed = tolerance * std::sqrt(static_cast<double>(whole.count()) + 1);

  CudaStream stream;
  Memory memory;
  struct Part {
    NormShape shape;
    detail::NormWork<DeviceMemory> work;
    Array<T> x, residual, y, dy, dx, dresidual;
    Array<W> weight, bias, weight_gradient, bias_gradient;
    Array<A> mean, variance;
    Array<std::int64_t> batches;
  };
  std::vector<std::unique_ptr<Part>> parts;
  const auto slice = [&](const std::vector<T>& all, std::size_t first, std::size_t count) {
    const auto per_sample = static_cast<std::ptrdiff_t>(channels * whole.positions);
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first) * per_sample;
    return Array<T>(memory,
                    std::vector<T>(begin, begin + static_cast<std::ptrdiff_t>(count) * per_sample),
                    course.offset);
  };
  for (std::size_t p = 0, first = 0; p != course.parts; ++p) {
    const std::size_t rest = whole.samples - first;
    // Uneven, and the second part is empty where there are three.
    const std::size_t count = p + 1 == course.parts ? rest
                              : course.parts == 3 && p == 1
                                  ? 0
                                  : std::min<std::size_t>(rest, rest / 3 + 1);
    parts.push_back(
        std::unique_ptr<Part>(new Part{{count, channels, whole.positions},
                                       {},
                                       slice(x, first, count),
                                       slice(residual, first, count),
                                       slice(std::vector<T>(x.size()), first, count),
                                       slice(dy, first, count),
                                       slice(std::vector<T>(x.size()), first, count),
                                       slice(std::vector<T>(x.size()), first, count),
                                       Array<W>(memory, weight),
                                       Array<W>(memory, bias),
                                       Array<W>(memory, channels),
                                       Array<W>(memory, channels),
                                       Array<A>(memory, mean),
                                       Array<A>(memory, variance),
                                       Array<std::int64_t>(memory, std::vector<std::int64_t>{3})}));
    first += count;
  }
  memory.upload(stream);
  const auto copy = [&](std::span<const double> from, std::span<double> to) {
    check_cuda(
        cudaMemcpyAsync(to.data(), from.data(), from.size_bytes(), cudaMemcpyDefault, stream),
        "cudaMemcpyAsync");
  };

  for (auto& part : parts) part->work.reserve(channels, course.parts);
  const auto running = [](const Part& part) {
    return detail::NormRunning<A>{part.mean.data(), part.variance.data(), part.batches.data()};
  };
  if (course.parts == 1) {
    Part& part = *parts[0];
    part.work.measure_alone(stream, part.shape, static_cast<const T*>(part.x.data()), options,
                            running(part));
  } else {
    for (auto& part : parts)
      part->work.measure(stream, part->shape, static_cast<const T*>(part->x.data()));
    for (auto& to : parts) {
      for (std::size_t r = 0; r != parts.size(); ++r) {
        const std::span<double> own = parts[r]->work.own();
        copy(own, to->work.all(parts.size()).subspan(r * own.size(), own.size()));
      }
      to->work.finalize(stream, to->shape, parts.size(), options, running(*to), "norm");
    }
  }
  const auto affine = [](const Part& part) {
    return detail::NormAffine<const W>{part.weight.data(), part.bias.data()};
  };
  for (auto& part : parts) {
    part->work.template normalise<F>(
        stream, part->shape, static_cast<const T*>(part->x.data()), affine(*part),
        static_cast<const T*>(adds ? part->residual.data() : nullptr), part->y.data());
    part->work.template reduce_backward<F>(
        stream, part->shape, static_cast<const T*>(part->x.data()),
        static_cast<const T*>(adds ? part->y.data() : nullptr),
        static_cast<const T*>(part->dy.data()), affine(*part),
        detail::NormAffine<W>{part->weight_gradient.data(), part->bias_gradient.data()},
        adds ? part->dresidual.data() : nullptr);
  }
  if (course.parts != 1) {
    Doubles own(course.parts * 2 * channels);
    Doubles total(2 * channels);
    for (std::size_t p = 0; p != course.parts; ++p)
      copy(parts[p]->work.sums(), std::span(own).subspan(p * total.size(), total.size()));
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    for (std::size_t i = 0; i != own.size(); ++i) total[i % total.size()] += own[i];
    for (auto& part : parts) copy(total, part->work.sums());
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  // dx may be dy's memory.
  const bool in_place = seed % 3 == 0;
  for (auto& part : parts) {
    T* const dx = in_place ? part->dy.data() : part->dx.data();
    const auto* const own = static_cast<const T*>(part->x.data());
    if constexpr (F == Fusion::add_relu) {
      part->work.template input_gradient<Fusion::none>(
          stream, part->shape, own, static_cast<const T*>(part->dresidual.data()), affine(*part),
          dx);
    } else {
      part->work.template input_gradient<F>(
          stream, part->shape, own, static_cast<const T*>(part->dy.data()), affine(*part), dx);
    }
  }
  memory.download(stream);

  const auto joined = [&](const auto& of) {
    Doubles all;
    for (auto& part : parts) {
      const Doubles some = numbers(of(*part).get());
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  };
  Doubles written;
  const auto expect = [&](const char* what, const Doubles& got, const Doubles& want,
                          double allowed) {
    const std::string wrong = difference(got, want, allowed);
    BOOST_TEST(wrong.empty(), what << ": " << wrong);
    written.insert(written.end(), got.begin(), got.end());
  };
  const Doubles known = numbers(residual);
  const Doubles y = joined([](Part& part) -> auto& { return part.y; });
  expect("y", y, expected.outputs(numbers(weight), numbers(bias), adds ? &known : nullptr, relu),
         2 * tolerance);
  Doubles g = numbers(dy);
  for (std::size_t i = 0; relu && i != g.size(); ++i) g[i] = y[i] <= 0 ? 0 : g[i];
  if (adds) expect("dresidual", joined([](Part& part) -> auto& { return part.dresidual; }), g, 0);
  const auto gradients = expected.gradients(numbers(weight), g);
  expect("dx", joined([&](Part& part) -> auto& { return in_place ? part.dy : part.dx; }),
         gradients.input, 2 * tolerance);
  Doubles weights(channels);
  Doubles biases(channels);
  for (auto& part : parts) {
    const Doubles w = numbers(part->weight_gradient.get());
    const Doubles b = numbers(part->bias_gradient.get());
    for (std::size_t c = 0; c != channels; ++c) {
      weights[c] += w[c];
      biases[c] += b[c];
    }
  }
  expect("the weight's gradient", weights, gradients.weight, summed);
  expect("the bias's gradient", biases, gradients.bias, summed);
  const double share = options.momentum < 0 ? 0.25 : options.momentum;
  Doubles running_mean(channels);
  Doubles running_variance(channels);
  for (std::size_t c = 0; c != channels; ++c) {
    running_mean[c] = (1 - share) * number(mean[c]) + share * expected.mean[c];
    running_variance[c] = (1 - share) * 2 + share * expected.variance[c];
  }
  for (auto& part : parts) {
    expect("running mean", numbers(part->mean.get()), running_mean, std::min(tolerance, 1e-5));
    expect("running variance", numbers(part->variance.get()), running_variance,
           std::min(tolerance, 1e-4));
    BOOST_TEST(part->batches.get()[0] == 4);
  }
  return written;
}

/// Shapes of both layouts, with packets that fit and that do not, of one block and of many.
inline std::vector<NormShape> shapes(std::mt19937& random, std::size_t most_values) {
  std::vector<NormShape> all{{2, 1, 1},  {5, 3, 1},    {64, 32, 1}, {301, 7, 1}, {130, 264, 1},
                             {9, 40, 1}, {600, 16, 1}, {2, 3, 2},   {3, 5, 7},   {4, 2, 64},
                             {2, 6, 49}, {1, 3, 5000}, {7, 1, 333}, {5, 4, 1024}};
  for (int i = 0; i != 6; ++i) {
    const std::size_t channels = random() % 70 + 1;
    const std::size_t positions = i % 2 == 0 ? 1 : random() % 90 + 2;
    const std::size_t samples = random() % (most_values / (channels * positions) + 1) + 2;
    all.push_back({samples, channels, positions});
  }
  return all;
}

/// Every shape, with one of the fusions after the other, aligned and not, alone and divided. Two
/// runs have the same bits.
template <class T, class W, Fusion... Fused>
void check_batch_norms(std::size_t most_values, unsigned seed) {
  constexpr Doubles (*checks[])(const NormShape&, const Course&,
                                unsigned) = {check_batch_norm<Fused, T, W>...};
  std::mt19937 random(seed);
  for (const NormShape& shape : shapes(random, most_values)) {
    Course course;
    course.offset = random() % 3 == 0 ? 1 : 0;
    course.parts = random() % 3 + 1;
    const unsigned own = random();
    const std::size_t which = random() % sizeof...(Fused);
    BOOST_TEST_CONTEXT(shape.samples << " x " << shape.channels << " x " << shape.positions
                                     << " of " << detail::element_name(element_kind<T>())
                                     << ", check " << which << ", offset " << course.offset << ", "
                                     << course.parts << " parts, seed " << own) {
      const Doubles first = checks[which](shape, course, own);
      const Doubles second = checks[which](shape, course, own);
      BOOST_TEST(std::memcmp(first.data(), second.data(), first.size() * sizeof(double)) == 0,
                 "two runs differ");
    }
  }
}
template <class T, class W = detail::Accumulator<T>>
void check_batch_norms(std::size_t most_values, unsigned seed) {
  check_batch_norms<T, W, Fusion::none, Fusion::relu, Fusion::add_relu>(most_values, seed);
}

/// A mean that is large beside the deviation loses nothing.
inline void check_large_means() {
  for (const NormShape& shape : {NormShape{4000, 4, 1}, NormShape{20, 3, 196}}) {
    for (std::size_t parts = 1; parts != 3; ++parts) {
      Course course;
      course.mean = 1e4;
      course.deviation = 1;
      course.parts = parts;
      BOOST_TEST_CONTEXT("mean 1e4, " << parts << " parts")
      check_batch_norm<Fusion::none, float, float>(shape, course, 4);
    }
  }
}

/// An evaluation normalises by the running statistics.
inline void check_running() {
  const NormShape shape{3, 5, 6};
  std::mt19937 random(5);
  const auto x = random_values<float>(random, shape.size(), 0, 1);
  const auto weight = random_values<float>(random, shape.channels, 1, 0.3);
  const auto bias = random_values<float>(random, shape.channels, 0, 0.5);
  const auto mean = random_values<float>(random, shape.channels, 0, 1);
  const std::vector<float> variance{0.5F, 1, 2, 3, 4};
  CudaStream stream;
  Memory memory;
  const Array<float> given(memory, x), y(memory, x.size());
  const Array<float> w(memory, weight), b(memory, bias), m(memory, mean), v(memory, variance);
  const Array<std::int64_t> batches(memory, 1);
  memory.upload(stream);
  detail::NormWork<DeviceMemory> work;
  BOOST_TEST(work.reserve(shape.channels, 1));
  BOOST_TEST(!work.reserve(shape.channels, 1));
  work.finalize_from_running(stream, shape, BatchNormOptions{},
                             detail::NormRunning<float>{m.data(), v.data(), batches.data()});
  work.normalise<Fusion::none>(stream, shape, static_cast<const float*>(given.data()),
                               detail::NormAffine<const float>{w.data(), b.data()},
                               static_cast<const float*>(nullptr), y.data());
  memory.download(stream);
  Doubles want(x.size());
  for (std::size_t i = 0; i != x.size(); ++i) {
    const std::size_t c = i / shape.positions % shape.channels;
    want[i] = (number(x[i]) - number(mean[c])) / std::sqrt(number(variance[c]) + 1e-5) *
                  number(weight[c]) +
              number(bias[c]);
  }
  const std::string wrong = difference(numbers(y.get()), want, 1e-5);
  BOOST_TEST(wrong.empty(), wrong);
  BOOST_TEST(batches.get()[0] == 0);
}

/// A layer norm of one shape, forward and backward.
template <class T, class W = detail::Accumulator<T>>
void check_layer_norm(std::size_t rows, std::size_t features, std::size_t offset, unsigned seed) {
  std::mt19937 random(seed);
  const double eps = 1e-5;
  const auto x = random_values<T>(random, rows * features, 3, 2);
  const auto dy = random_values<T>(random, rows * features, 0, 1);
  const auto weight = random_values<W>(random, features, 1, 0.3);
  const auto bias = random_values<W>(random, features, 0, 0.5);
  CudaStream stream;
  Memory memory;
  const Array<T> given(memory, x, offset), errors(memory, dy, offset);
  const Array<T> y(memory, x.size(), offset), dx(memory, x.size(), offset);
  const Array<W> w(memory, weight), b(memory, bias);
  const Array<W> weight_gradient(memory, features), bias_gradient(memory, features);
  memory.upload(stream);
  detail::LayerNormWork<DeviceMemory> work;
  const detail::NormAffine<const W> affine{w.data(), b.data()};
  const bool in_place = seed % 2 == 0;
  work.template forward<true>(stream, rows, features, eps, static_cast<const T*>(given.data()),
                              affine, y.data());
  work.backward(stream, rows, features, static_cast<const T*>(given.data()),
                static_cast<const T*>(errors.data()), affine,
                detail::NormAffine<W>{weight_gradient.data(), bias_gradient.data()},
                in_place ? errors.data() : dx.data());
  memory.download(stream);
  Doubles want_y(x.size()), want_dx(x.size()), want_w(features), want_b(features);
  const auto n = static_cast<double>(features);
  for (std::size_t r = 0; r != rows; ++r) {
    const auto value = [&](std::size_t i) { return number(x[r * features + i]); };
    double mean = 0, m2 = 0, sum = 0, product = 0;
    for (std::size_t i = 0; i != features; ++i) mean += value(i) / n;
    for (std::size_t i = 0; i != features; ++i) m2 += (value(i) - mean) * (value(i) - mean);
    const double inverse = 1 / std::sqrt(m2 / n + eps);
    for (std::size_t i = 0; i != features; ++i) {
      const double g = number(dy[r * features + i]);
      const double apart = value(i) - mean;
      want_y[r * features + i] = apart * inverse * number(weight[i]) + number(bias[i]);
      want_w[i] += g * apart * inverse;
      want_b[i] += g;
      sum += g * number(weight[i]) / n;
      product += g * number(weight[i]) * apart / n;
    }
    for (std::size_t i = 0; i != features; ++i) {
      const double g = number(dy[r * features + i]) * number(weight[i]);
      want_dx[r * features + i] =
          (g - sum - (value(i) - mean) * inverse * inverse * product) * inverse;
    }
  }
  const double tolerance = rounding<T>();
  const auto expect = [&](const char* what, const Doubles& got, const Doubles& want,
                          double allowed) {
    const std::string wrong = difference(got, want, allowed);
    BOOST_TEST(wrong.empty(), what << " of " << rows << " x " << features << ": " << wrong);
  };
  expect("y", numbers(y.get()), want_y, 2 * tolerance);
  expect("dx", numbers(in_place ? errors.get() : dx.get()), want_dx, 2 * tolerance);
  const double summed = tolerance * std::sqrt(static_cast<double>(rows) + 1);
  expect("the weight's gradient", numbers(weight_gradient.get()), want_w, summed);
  expect("the bias's gradient", numbers(bias_gradient.get()), want_b, summed);
}

/// A block that takes very many rows hands its sums on several times.
inline void check_sums_of_many_rows() {
  constexpr std::size_t rows = 40001, features = 8;
  std::mt19937 random(7);
  const auto x = random_values<float>(random, rows * features, 3, 2);
  const auto dy = random_values<float>(random, rows * features, 0.1, 1);
  Memory memory;
  const Array<float> given(memory, x), errors(memory, dy), dx(memory, x.size());
  const Array<float> weight(memory, std::vector<float>(features, 1)), sums(memory, 2 * features);
  const double mean = 3;
  const double inverse = 0.5;
  Doubles of_rows;
  for (std::size_t r = 0; r != rows; ++r) of_rows.insert(of_rows.end(), {mean, inverse});
  const Array<double> kept(memory, of_rows);
  CudaStream stream;
  memory.upload(stream);
  detail::launch_kernel<detail::gradients_of_rows<4, float, float>>(
      "gradients of a layer norm", stream, 1, detail::channel_threads,
      static_cast<const float*>(given.data()), static_cast<const float*>(errors.data()), dx.data(),
      static_cast<const float*>(weight.data()),
      reinterpret_cast<const detail::SavedStatistics*>(kept.data()),
      reinterpret_cast<detail::ColumnSums<float>*>(sums.data()), rows, features,
      detail::held_tile<4>(features / 4));
  memory.download(stream);
  Doubles want(2 * features);
  for (std::size_t i = 0; i != x.size(); ++i) {
    want[i % features * 2] += number(dy[i]);
    want[i % features * 2 + 1] += number(dy[i]) * (number(x[i]) - mean) * inverse;
  }
  const std::string wrong = difference(numbers(sums.get()), want, 1e-4);
  BOOST_TEST(wrong.empty(), wrong);
}

template <class T, class W = detail::Accumulator<T>>
void check_layer_norms(unsigned seed) {
  std::mt19937 random(seed);
  for (const std::size_t features : {1u, 3u, 16u, 64u, 200u, 768u, 1029u, 4096u, 20000u}) {
    const std::size_t rows = random() % (20000 / features + 1) % 70 + 2;
    check_layer_norm<T, W>(rows, features, random() % 3 == 0 ? 1 : 0, random());
  }
}

}  // namespace norm_checks
