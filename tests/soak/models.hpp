// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The models that soaks train, of any shape: linear layers with a dropout and with tensors
/// that not every batch uses, and a network with a batch norm. Everything but the ReLU behind the
/// norm is smooth, so that roundings stay roundings.

#include <algorithm>

#include "soak/plain.hpp"
#include "train/plain_mlp.hpp"

namespace soak {

/// Linear layers with tanh between them, squared error. T is what parameters and gradients are
/// kept in; the arithmetic is in double. Tensors are listed at run time, as many as the shape says.
template <class T, bool Draws = false>
struct Deep {
  using Elements = ElementList<T>;
  static constexpr bool draws = Draws;

  explicit Deep(const Drawn& drawn)
      : widths(drawn.shape), branches(drawn.branches), drop(drawn.drop) {}

  std::size_t layers() const { return widths.size() - 1; }

  void for_each_tensor(const auto& f) const {
    for (std::size_t l = 0; l != layers(); ++l) {
      f(std::to_string(l) + ".weight", std::vector{widths[l + 1], widths[l]});
      f(std::to_string(l) + ".bias", std::vector{widths[l + 1]});
    }
    for (std::size_t b = 0; b != branches; ++b)
      f("branch." + std::to_string(b), std::vector{widths.back()});
  }
  void tensors(TensorList& list) const {
    for_each_tensor([&](const std::string& name, const std::vector<std::size_t>& extents) {
      list.parameter(name, element_kind<T>(), extents);
    });
  }
  void initialize(auto& initial) const {
    std::size_t p = 0;
    initial.for_each_parameter([&](std::string_view, const auto& view) {
      for (std::size_t i = 0; i != view.size(); ++i) put(view.data_handle()[i], first_value(p, i));
      ++p;
    });
  }

  template <class Step>
  double forward(Step& step, const LabelledBatch<double, double>& batch) {
    values.resize(layers() + 1);
    values[0] = batch.inputs;
    for (std::size_t l = 0; l != layers(); ++l) {
      const std::size_t in = widths[l], out = widths[l + 1];
      const auto weight = step.param(2 * l);
      const auto bias = step.param(2 * l + 1);
      values[l + 1].assign(batch.size() * out, 0);
      for (std::size_t b = 0; b != batch.size(); ++b) {
        for (std::size_t j = 0; j != out; ++j) {
          double sum = get(bias(j));
          for (std::size_t i = 0; i != in; ++i)
            sum += get(weight(j * in + i)) * values[l][b * in + i];
          values[l + 1][b * out + j] = l + 1 == layers() ? sum : std::tanh(sum);
        }
      }
      if (l == 0 && layers() > 1) drop_some(step, values[1]);
    }
    errors = values.back();
    double loss = 0;
    const std::size_t out = widths.back();
    for (std::size_t b = 0; b != batch.size(); ++b) {
      for (std::size_t j = 0; j != out; ++j) {
        double& error = errors[b * out + j];
        if (branches != 0) error += get(step.param(2 * layers() + branch_of(batch, b))(j));
        error -= std::sin(batch.labels[b] + static_cast<double>(j));
        loss += error * error / 2;
      }
    }
    return loss / static_cast<double>(batch.size());
  }

  template <class Step>
  void backward(Step& step, const LabelledBatch<double, double>& batch) {
    const double scale = 1 / static_cast<double>(batch.size());
    std::vector<double> d = errors, before;
    for (double& value : d) value *= scale;
    const std::size_t out = widths.back();
    for (std::size_t branch = branches; branch-- != 0;) {
      std::vector<double> sum(out);
      bool is_used = false;
      for (std::size_t b = 0; b != batch.size(); ++b) {
        if (branch_of(batch, b) != branch) continue;
        is_used = true;
        for (std::size_t j = 0; j != out; ++j) sum[j] += d[b * out + j];
      }
      if (is_used) give(step, 2 * layers() + branch, sum);
    }
    for (std::size_t l = layers(); l-- != 0;) {
      const std::size_t in = widths[l], n = widths[l + 1];
      std::vector<double> by_bias(n), by_weight(n * in);
      before.assign(batch.size() * in, 0);
      const auto weight = step.param(2 * l);
      for (std::size_t b = 0; b != batch.size(); ++b) {
        for (std::size_t j = 0; j != n; ++j) {
          const double slope = d[b * n + j];
          by_bias[j] += slope;
          for (std::size_t i = 0; i != in; ++i) {
            by_weight[j * in + i] += slope * values[l][b * in + i];
            before[b * in + i] += slope * get(weight(j * in + i));
          }
        }
      }
      give(step, 2 * l + 1, by_bias);
      give(step, 2 * l, by_weight);
      if (l == 1) drop_some(step, before);
      if (l != 0) {
        // Of a dropped value the gradient is 0 already; the others' tanh is undone by the scale.
        const double kept = l == 1 && Draws ? 1 - drop : 1;
        for (std::size_t i = 0; i != before.size(); ++i) {
          const double y = values[l][i] * kept;
          before[i] *= 1 - y * y;
        }
      }
      d = before;
    }
  }

  std::vector<std::size_t> widths;
  std::size_t branches;
  double drop;

 private:
  template <class V>
  static double get(const V& value) {
    return static_cast<double>(static_cast<detail::Accumulator<V>>(value));
  }
  template <class V>
  static void put(V& to, double value) {
    to = static_cast<V>(static_cast<detail::Accumulator<V>>(value));
  }
  static void give(auto& step, std::size_t p, const std::vector<double>& sums) {
    if (!step.trains(p)) return;
    const auto gradient = step.grad(p);
    for (std::size_t i = 0; i != sums.size(); ++i) put(gradient(i), sums[i]);
    step.ready(p);
  }
  std::size_t branch_of(const auto& batch, std::size_t b) const {
    return static_cast<std::size_t>(batch.labels[b]) % branches;
  }
  template <class Step>
  void drop_some(Step& step, std::vector<double>& all) const {
    if constexpr (Draws && Step::is_training()) {
      const LayerRandom random = step.random(std::string_view("drop"));
      for (std::size_t i = 0; i != all.size(); ++i)
        all[i] = random.template uniform<double>(i) < drop ? 0 : all[i] / (1 - drop);
    }
  }

  std::vector<std::vector<double>> values;  // the inputs, and what each layer put out
  std::vector<double> errors;
};

/// Its network in one process: no tensor of it is the library's.
template <class T, bool Draws>
class PlainDeep {
 public:
  explicit PlainDeep(const Drawn& drawn) : model_(drawn), step_(tensors_) {
    model_.for_each_tensor([&](const std::string& name, const std::vector<std::size_t>& extents) {
      PlainTensor tensor{.name = name, .values = {}, .gradient = {}, .sum = {}};
      std::size_t count = 1;
      for (const std::size_t extent : extents) count *= extent;
      for (std::size_t i = 0; i != count; ++i)
        tensor.values.push_back(first_value(tensors_.size(), i));
      tensor.gradient.resize(count);
      tensors_.push_back(std::move(tensor));
    });
  }
  std::vector<PlainTensor>& tensors() { return tensors_; }
  double run(const LabelledBatch<double, double>& batch, std::uint64_t key) {
    step_.key = key;
    const double loss = model_.forward(step_, batch);
    model_.backward(step_, batch);
    return loss;
  }

 private:
  Deep<double, Draws> model_;
  std::vector<PlainTensor> tensors_;
  PlainStep step_;
};

/// Linear, batch norm, ReLU, linear, squared error.
struct Normed : train::PlainLayers {
  using Norm1 = BatchNorm<"bn", dynamic, double>;
  using Parameters = ParameterList<
      Parameter<"0.weight", double, dynamic, dynamic>, Parameter<"0.bias", double, dynamic>, Norm1,
      Parameter<"1.weight", double, dynamic, dynamic>, Parameter<"1.bias", double, dynamic>>;
  using Buffers = BufferList<Norm1>;

  explicit Normed(const Drawn& drawn)
      : in(drawn.shape.front()), hidden(drawn.shape.at(1)), out(drawn.shape.back()) {}

  void shapes(auto& shape) const {
    shape("0.weight"_p, hidden, in);
    shape("0.bias"_p, hidden);
    Norm1::shapes(shape, hidden);
    shape("1.weight"_p, out, hidden);
    shape("1.bias"_p, out);
  }
  void initialize(auto& initial) const {
    std::size_t p = 0;
    initial.for_each_parameter([&](std::string_view name, const auto& view) {
      fill(name, p++, std::span(view.data_handle(), view.size()));
    });
  }
  static void fill(std::string_view name, std::size_t p, std::span<double> values) {
    for (std::size_t i = 0; i != values.size(); ++i)
      values[i] = first_value(p, i) + (name == "bn.weight" ? 1 : 0);
  }

  auto rows(auto& values) const {
    using T = std::remove_pointer_t<decltype(values.data())>;
    return HostView<T, dynamic, dynamic>(values.data(), values.size() / hidden, hidden);
  }

  double forward(auto& step, const LabelledBatch<double, double>& batch) {
    linear(step.param("0.weight"_p), step.param("0.bias"_p), batch.inputs, sums, false);
    active.resize(sums.size());
    norm.forward_relu(step, rows(std::as_const(sums)), rows(active));
    linear(step.param("1.weight"_p), step.param("1.bias"_p), active, errors, false);
    double loss = 0;
    for (std::size_t i = 0; i != errors.size(); ++i) {
      errors[i] -= std::sin(batch.labels[i / out] + static_cast<double>(i % out));
      loss += errors[i] * errors[i] / 2;
    }
    return loss / static_cast<double>(batch.size());
  }
  void backward(auto& step, const LabelledBatch<double, double>& batch) {
    std::vector<double> d = errors;
    for (double& value : d) value /= static_cast<double>(batch.size());
    layer_back(step, "1.weight"_p, "1.bias"_p, active, d);
    d = input_gradient(step.param("1.weight"_p), d);
    norm.backward_relu(step, rows(std::as_const(sums)), rows(std::as_const(d)), rows(d));
    layer_back(step, "0.weight"_p, "0.bias"_p, batch.inputs, d);
  }

  std::size_t in, hidden, out;
  Norm1 norm;

 private:
  std::vector<double> sums, active, errors;
};

struct OnHost {
  using From = HostElements;
  static Samples<double, double> samples(const Drawn& drawn) {
    return {drawn.samples, drawn.shape.front()};
  }
};
template <class T, bool Draws>
struct About<Deep<T, Draws>> : OnHost {
  using Net = PlainDeep<T, Draws>;
};
template <>
struct About<Normed> : OnHost {
  using Net = PlainDeclared<Normed>;
};

}  // namespace soak
