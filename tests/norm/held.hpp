// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A model of one norm, with memory of its own and a step, and the arithmetic of batch norms
/// in plain loops over doubles: slow and easy to believe.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/detail/bucket/layout.hpp"
#include "lockstep/detail/bucket/step.hpp"
#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/random_stream.hpp"
#include "lockstep/detail/device/device.hpp"
#include "lockstep/detail/norm/batch_norm.hpp"
#include "lockstep/detail/norm/layer_norm.hpp"
#include "lockstep/detail/strategy/initial_values.hpp"

namespace norm_test {

using namespace lockstep;

template <class T>
double wide(T value) {
  return static_cast<double>(static_cast<detail::Accumulator<T>>(value));
}
template <class T>
T narrow(double value) {
  return static_cast<T>(static_cast<detail::Accumulator<T>>(value));
}

/// A norm and nothing else.
template <class Layer>
struct Normed {
  using Parameters = ParameterList<Layer>;
  using Buffers = BufferList<Layer>;

  std::size_t features = 0;
  Layer norm{};

  void shapes(auto& shape) const { Layer::shapes(shape, features); }
};

/// A model with its tensors, as they are before the first step.
template <class Model>
struct Held {
  Model model;
  detail::Layout<Model> parameters{model};
  detail::BufferLayout<Model> buffers{model};
  HostArena memory[3] = {HostArena(parameters.plan().all_bytes),
                         HostArena(parameters.plan().all_bytes),
                         HostArena(buffers.plan().all_bytes)};
  detail::BareStep<Model> step{
      parameters, buffers, {memory[0].data(), memory[1].data(), memory[2].data()}};
  detail::EvaluationStep<detail::BareStep<Model>> evaluation{step};

  explicit Held(const Model& from) : model(from) {
    detail::InitialValues<Model, detail::Layout<Model>> initial(
        parameters, buffers, memory[0].data(), memory[2].data(), Seed{1});
    detail::initialize_model(model, initial);
  }

  /// All numbers of a parameter, to write.
  auto parameter(auto key) {
    return parameters.template view<HostMemory, false>(memory[0].data(), key);
  }
};

/// Samples, channels and positions, and the numbers of an activation.
struct Numbers {
  std::size_t samples, channels, positions;
  std::vector<double> values{};

  std::size_t count() const { return samples * positions; }
  double& at(std::size_t n, std::size_t c, std::size_t p) {
    return values[(n * channels + c) * positions + p];
  }
  const double& at(std::size_t n, std::size_t c, std::size_t p) const {
    return values[(n * channels + c) * positions + p];
  }
  /// The same shape with numbers of zero.
  Numbers like() const {
    return {samples, channels, positions, std::vector<double>(values.size())};
  }
};

/// Random numbers of each channel's own mean and deviation, as T holds them.
template <class T>
Numbers random_numbers(std::size_t samples, std::size_t channels, std::size_t positions,
                       RandomStream& random) {
  Numbers numbers{samples, channels, positions,
                  std::vector<double>(samples * channels * positions)};
  for (std::size_t c = 0; c != channels; ++c) {
    const double mean = random.uniform(-3.0, 3.0);
    const double deviation = random.uniform(0.5, 2.0);
    for (std::size_t n = 0; n != samples; ++n) {
      for (std::size_t p = 0; p != positions; ++p)
        numbers.at(n, c, p) = wide(narrow<T>(mean + deviation * random.normal()));
    }
  }
  return numbers;
}

/// A batch norm over all values of each channel.
struct PlainNorm {
  std::vector<double> mean, variance, dweight, dbias;

  /// The normalised values, without weight and bias.
  Numbers normal(const Numbers& x, double eps = 1e-5) {
    Numbers result = x.like();
    const auto count = static_cast<double>(x.count());
    mean.assign(x.channels, 0);
    variance.assign(x.channels, 0);
    for (std::size_t c = 0; c != x.channels; ++c) {
      each(x, [&](std::size_t n, std::size_t p) { mean[c] += x.at(n, c, p) / count; });
      each(x, [&](std::size_t n, std::size_t p) {
        variance[c] += (x.at(n, c, p) - mean[c]) * (x.at(n, c, p) - mean[c]) / count;
      });
      each(x, [&](std::size_t n, std::size_t p) {
        result.at(n, c, p) = (x.at(n, c, p) - mean[c]) / std::sqrt(variance[c] + eps);
      });
    }
    return result;
  }

  /// dx, from the gradient g of weight * normal + bias.
  Numbers backward(const Numbers& normal, const Numbers& g, const std::vector<double>& weight,
                   double eps = 1e-5) {
    Numbers dx = g.like();
    const auto count = static_cast<double>(g.count());
    dweight.assign(g.channels, 0);
    dbias.assign(g.channels, 0);
    for (std::size_t c = 0; c != g.channels; ++c) {
      each(g, [&](std::size_t n, std::size_t p) {
        dweight[c] += g.at(n, c, p) * normal.at(n, c, p);
        dbias[c] += g.at(n, c, p);
      });
      each(g, [&](std::size_t n, std::size_t p) {
        dx.at(n, c, p) =
            weight[c] / std::sqrt(variance[c] + eps) *
            (g.at(n, c, p) - dbias[c] / count - normal.at(n, c, p) * dweight[c] / count);
      });
    }
    return dx;
  }

  static void each(const Numbers& x, const auto& f) {
    for (std::size_t n = 0; n != x.samples; ++n) {
      for (std::size_t p = 0; p != x.positions; ++p) f(n, p);
    }
  }
};

}  // namespace norm_test
