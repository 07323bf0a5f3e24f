// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The reference network of `ddp.json` in plain loops: Linear, ReLU, Linear, ReLU, Linear,
/// cross entropy. Slow and easy to believe.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "lockstep/detail/bucket/step.hpp"
#include "lockstep/detail/core/dynamic.hpp"
#include "lockstep/detail/model/declaration.hpp"
#include "lockstep/detail/model/model.hpp"

namespace train {

using namespace lockstep;

/// wave(shape, k, scale)[i] = scale * sin(0.37 i + k): what reference data is made of.
inline double wave(std::size_t i, double k, double scale) {
  return scale * std::sin(0.37 * static_cast<double>(i) + k);
}

/// Calls `f(step)` if the parameter is trained: known to the compiler, or where tensors are listed
/// to the step. Steps of tests that freeze nothing need not say it.
template <class Step, class Key, class F>
void if_trained(Step& step, Key key, const F& f) {
  if constexpr (requires { lockstep::trains<Step>(key); }) {
    if constexpr (lockstep::trains<Step>(Key{})) f(step);
  } else if constexpr (requires { step.trains(key); }) {
    if (step.trains(key)) f(step);
  } else {
    f(step);
  }
}

struct Samples {
  std::size_t inputs = 0;
  std::vector<double> x;  // rows of `inputs`
  std::vector<std::size_t> y;

  std::size_t size() const { return y.size(); }

  void slice(std::size_t first, std::size_t count, Samples& out) const {
    out.inputs = inputs;
    out.x.assign(&x[first * inputs], &x[first * inputs] + count * inputs);
    out.y.assign(&y[first], &y[first] + count);
  }
};

/// A linear layer in plain loops: rows of inputs, a row of outputs for each.
struct PlainLayers {
  static void linear(const auto& w, const auto& bias, const std::vector<double>& x,
                     std::vector<double>& y, bool relu) {
    const std::size_t n = w.extent(0);
    const std::size_t m = w.extent(1);
    y.assign(x.size() / m * n, 0);
    for (std::size_t b = 0; b < x.size() / m; ++b) {
      for (std::size_t j = 0; j < n; ++j) {
        double sum = bias(j);
        for (std::size_t i = 0; i < m; ++i) sum += w(j, i) * x[b * m + i];
        y[b * n + j] = relu ? std::max(0.0, sum) : sum;
      }
    }
  }

  static void layer_back(auto& step, auto weight, auto bias, const std::vector<double>& x,
                         const std::vector<double>& d) {
    const std::size_t n = step.param(weight).extent(0);
    const std::size_t m = step.param(weight).extent(1);
    const std::size_t rows = d.size() / n;
    if_trained(step, bias, [&](auto& trained) {
      const auto gradient = trained.grad(bias);
      for (std::size_t j = 0; j < n; ++j) {
        gradient(j) = 0;
        for (std::size_t b = 0; b < rows; ++b) gradient(j) += d[b * n + j];
      }
      trained.ready(bias);
    });
    if_trained(step, weight, [&](auto& trained) {
      const auto gradient = trained.grad(weight);
      for (std::size_t j = 0; j < n; ++j) {
        for (std::size_t i = 0; i < m; ++i) {
          gradient(j, i) = 0;
          for (std::size_t b = 0; b < rows; ++b) gradient(j, i) += d[b * n + j] * x[b * m + i];
        }
      }
      trained.ready(weight);
    });
  }

  /// The gradient by a layer's inputs.
  static std::vector<double> input_gradient(const auto& w, const std::vector<double>& d) {
    const std::size_t n = w.extent(0);
    const std::size_t m = w.extent(1);
    std::vector<double> result(d.size() / n * m, 0);
    for (std::size_t b = 0; b < d.size() / n; ++b) {
      for (std::size_t i = 0; i < m; ++i) {
        for (std::size_t j = 0; j < n; ++j) result[b * m + i] += w(j, i) * d[b * n + j];
      }
    }
    return result;
  }

  /// The mean cross entropy of rows of outputs, which become probabilities.
  static double cross_entropy(const std::vector<std::size_t>& y, std::size_t out,
                              std::vector<double>& outputs) {
    double loss = 0;
    for (std::size_t b = 0; b < y.size(); ++b) {
      double* const row = &outputs[b * out];
      const double top = *std::max_element(row, row + out);
      double sum = 0;
      for (std::size_t j = 0; j < out; ++j) sum += std::exp(row[j] - top);
      loss += std::log(sum) + top - row[y[b]];
      for (std::size_t j = 0; j < out; ++j) row[j] = std::exp(row[j] - top) / sum;
    }
    return loss / static_cast<double>(y.size());
  }
  /// The gradient of that, times `scale`.
  static std::vector<double> cross_entropy_gradient(const std::vector<std::size_t>& y,
                                                    std::size_t out,
                                                    std::vector<double> probabilities,
                                                    double scale = 1) {
    for (std::size_t b = 0; b < y.size(); ++b) probabilities[b * out + y[b]] -= 1;
    for (double& value : probabilities) value *= scale / static_cast<double>(y.size());
    return probabilities;
  }
};

/// Extents may be `dynamic`: then they are the constructor's.
template <std::size_t In, std::size_t Hidden, std::size_t Out>
struct PlainMlp : PlainLayers {
  using Parameters = ParameterList<
      Parameter<"fc1.weight", double, Hidden, In>, Parameter<"fc1.bias", double, Hidden>,
      Parameter<"fc2.weight", double, Hidden, Hidden>, Parameter<"fc2.bias", double, Hidden>,
      Parameter<"fc3.weight", double, Out, Hidden>, Parameter<"fc3.bias", double, Out>>;

  std::size_t in = In;
  std::size_t hidden = Hidden;
  std::size_t out = Out;
  double loss_scale = 1;
  bool leaves_out_fc2 = false;  // its gradient is then zero

  void shapes(auto& shape) const {
    shape("fc1.weight"_p, hidden, in);
    shape("fc1.bias"_p, hidden);
    shape("fc2.weight"_p, hidden, hidden);
    shape("fc2.bias"_p, hidden);
    shape("fc3.weight"_p, out, hidden);
    shape("fc3.bias"_p, out);
  }

  void initialize(auto& initial) {
    double k = 1;
    const auto fill = [&](const auto& view) {
      for (std::size_t i = 0; i < view.size(); ++i) view.data_handle()[i] = wave(i, k, 0.2);
      ++k;
    };
    for_each_parameter(initial, fill);
  }

  static void for_each_parameter(const auto& step, auto&& f) {
    f(step.param("fc1.weight"_p));
    f(step.param("fc1.bias"_p));
    f(step.param("fc2.weight"_p));
    f(step.param("fc2.bias"_p));
    f(step.param("fc3.weight"_p));
    f(step.param("fc3.bias"_p));
  }

  double forward(auto& step, const Samples& batch) {
    run(step, batch, probabilities);
    return loss_scale * cross_entropy(batch.y, out, probabilities);
  }

  void backward(auto& step, const Samples& batch) {
    go_back(step, batch, cross_entropy_gradient(batch.y, out, probabilities, loss_scale));
  }

 protected:
  /// Up to the last layer's outputs.
  void run(auto& step, const Samples& batch, std::vector<double>& outputs) {
    linear(step.param("fc1.weight"_p), step.param("fc1.bias"_p), batch.x, a1, true);
    if (leaves_out_fc2) {
      a2 = a1;
    } else {
      linear(step.param("fc2.weight"_p), step.param("fc2.bias"_p), a1, a2, true);
    }
    linear(step.param("fc3.weight"_p), step.param("fc3.bias"_p), a2, outputs, false);
  }

  /// Back from their gradient.
  void go_back(auto& step, const Samples& batch, std::vector<double> d) {
    layer_back(step, "fc3.weight"_p, "fc3.bias"_p, a2, d);
    d = input_gradient(step.param("fc3.weight"_p), d, a2);
    if (leaves_out_fc2) {
      layer_back(step, "fc2.weight"_p, "fc2.bias"_p, a1, std::vector<double>(a1.size(), 0));
    } else {
      layer_back(step, "fc2.weight"_p, "fc2.bias"_p, a1, d);
      d = input_gradient(step.param("fc2.weight"_p), d, a1);
    }
    layer_back(step, "fc1.weight"_p, "fc1.bias"_p, batch.x, d);
  }

 private:
  /// Back through a layer and the ReLU before it.
  static std::vector<double> input_gradient(const auto& w, const std::vector<double>& d,
                                            const std::vector<double>& activation) {
    std::vector<double> result = PlainLayers::input_gradient(w, d);
    for (std::size_t i = 0; i < result.size(); ++i)
      if (activation[i] <= 0) result[i] = 0;
    return result;
  }

  std::vector<double> a1, a2, probabilities;
};

/// The same in two parts: outputs, and the loss of all of them.
template <std::size_t In, std::size_t Hidden, std::size_t Out>
struct SplitMlp : PlainMlp<In, Hidden, Out> {
  using Output = OutputOf<double, Out>;
  auto output_extents() const { return std::array<std::size_t, 1>{this->out}; }

  std::size_t losses = 0;  // that this replica has taken
  std::size_t samples = 0;

  void predict(auto& step, const Samples& batch, auto outputs) {
    std::vector<double> values;
    this->run(step, batch, values);
    std::copy(values.begin(), values.end(), outputs.data_handle());
  }

  double loss(auto&, const Samples& batch, auto outputs, auto gradients) {
    ++losses;
    samples += batch.size();
    const std::size_t classes = outputs.extent(1);
    const auto rows = static_cast<double>(batch.size());
    double total = 0;
    for (std::size_t b = 0; b < batch.size(); ++b) {
      double sum = 0;
      for (std::size_t j = 0; j < classes; ++j) sum += std::exp(outputs(b, j));
      for (std::size_t j = 0; j < classes; ++j)
        gradients(b, j) = (std::exp(outputs(b, j)) / sum - (j == batch.y[b] ? 1 : 0)) / rows;
      total += std::log(sum) - outputs(b, batch.y[b]);
    }
    return total / rows;
  }

  using PlainMlp<In, Hidden, Out>::backward;
  void backward(auto& step, const Samples& batch, auto gradients) {
    const double* const d = gradients.data_handle();
    this->go_back(step, batch, std::vector<double>(d, d + gradients.size()));
  }
};

/// A network whose extents are known at run time.
template <class Network = PlainMlp<dynamic, dynamic, dynamic>>
Network network_of(std::size_t in, std::size_t hidden, std::size_t out) {
  Network network;
  network.in = in;
  network.hidden = hidden;
  network.out = out;
  return network;
}

/// The batch of rank r in micro-step s, as `ddp.json` has it.
inline Samples reference_batch(std::size_t rows, std::size_t inputs, std::size_t classes,
                               std::size_t s, std::size_t r) {
  Samples batch{inputs, std::vector<double>(rows * inputs), std::vector<std::size_t>(rows)};
  for (std::size_t i = 0; i < batch.x.size(); ++i)
    batch.x[i] = wave(i, 100 + 10 * static_cast<double>(s) + static_cast<double>(r), 1);
  for (std::size_t j = 0; j < rows; ++j) batch.y[j] = (7 * s + 3 * r + j) % classes;
  return batch;
}

}  // namespace train
