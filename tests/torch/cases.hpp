// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Modules that lockstep and PyTorch's DDP train alike: tests/torch/ddp_peer.py has the same.

#include <ATen/ATen.h>
#include <torch/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/observe/scores.hpp"
#include "lockstep/detail/torch/model.hpp"

namespace torch_tests {

using namespace lockstep;

/// Numbers that float has exactly, so that Python makes the same ones.
inline at::Tensor pattern(at::IntArrayRef sizes, std::int64_t number, double scale) {
  const at::Tensor i = at::arange(c10::multiply_integers(sizes), at::kLong);
  const at::Tensor mixed = i * i * 37 + i * 7919 + number * 104729;
  return (mixed.remainder(2001) - 1000).to(at::kFloat).mul(scale / 1024).view(sizes);
}
inline at::Tensor whole_numbers(at::IntArrayRef sizes, std::int64_t number, std::int64_t end) {
  const at::Tensor i = at::arange(c10::multiply_integers(sizes), at::kLong);
  return (i * i * 5 + i * 3 + number * 7).remainder(end).view(sizes);
}

struct Batch {
  at::Tensor inputs;
  at::Tensor labels;
  std::size_t size() const { return static_cast<std::size_t>(inputs.size(0)); }
  Batch slice(std::size_t first, std::size_t count) const {
    const auto cut = [&](const at::Tensor& tensor) {
      return tensor.narrow(0, static_cast<std::int64_t>(first), static_cast<std::int64_t>(count));
    };
    return {cut(inputs), cut(labels)};
  }
};

/// A module whose parts are known at run time, so that all cases are one type.
struct Net : ::torch::nn::Module {
  std::function<at::Tensor(const at::Tensor&)> run;
  at::Tensor forward(const at::Tensor& x) { return run(x); }
};
using LossOf = std::function<at::Tensor(Net&, const Batch&)>;

inline at::Tensor cross_entropy(Net& net, const Batch& batch) {
  return at::cross_entropy_loss(net.forward(batch.inputs), batch.labels);
}

struct Model : TorchModel<Model, Net> {
  explicit Model(std::shared_ptr<Net> net, LossOf of = cross_entropy)
      : TorchModel(std::move(net)), loss_of(std::move(of)) {}
  at::Tensor loss(const Batch& batch) { return loss_of(module(), batch); }
  void score(const Batch& batch, auto& tally) {
    const at::Tensor outputs = module().forward(batch.inputs);
    const auto count = static_cast<double>(batch.size());
    tally.add("loss", at::cross_entropy_loss(outputs, batch.labels).template item<double>() * count,
              count);
    tally.add("accuracy", outputs.argmax(1).eq(batch.labels).sum().template item<double>(), count);
  }
  LossOf loss_of;
};

/// Parameters, each once, and buffers begin as what Python begins with too.
inline void set_initial_values(Net& net) {
  const at::NoGradGuard quiet;
  std::int64_t number = 0;
  for (auto& parameter : lockstep::detail::module_parameters(net))
    parameter.tensor.copy_(pattern(parameter.tensor.sizes(), ++number, 0.25));
}

/// Every value of a module, parameters first.
inline std::vector<float> values_of(const Net& net) {
  const at::NoGradGuard quiet;
  std::vector<float> values;
  const auto append = [&](const auto& tensors) {
    for (const auto& each : tensors) {
      const at::Tensor row = each.tensor.detach().to(at::kFloat).contiguous();
      values.insert(values.end(), row.template const_data_ptr<float>(),
                    row.template const_data_ptr<float>() + row.numel());
    }
  };
  append(lockstep::detail::module_parameters(net));
  append(lockstep::detail::module_buffers(net));
  return values;
}

/// A training that both make.
struct Case {
  std::string name;
  int steps;
  double lr;
  double momentum;
  bool adamw = false;
  bool divides = true;  ///< one process with all samples trains the same
};

inline const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"plain", 60, 0.0625, 0},          {"momentum", 60, 0.015625, 0.875},
      {"adamw", 6, 0.00390625, 0, true}, {"norm", 20, 0.03125, 0.875, false, false},
      {"frozen", 10, 0.0625, 0},         {"tied", 10, 0.0625, 0},
      {"sparse", 10, 0.0625, 0},         {"channels_last", 10, 0.0625, 0},
      {"penalty", 10, 0.0625, 0},
  };
  return all;
}

constexpr std::int64_t batch_rows = 4;

inline Batch batch_of(const std::string& name, std::size_t step, std::size_t rank) {
  const auto number = static_cast<std::int64_t>(step * 16 + rank);
  const at::Tensor labels = whole_numbers({batch_rows}, number, 5);
  if (name == "sparse") return {whole_numbers({batch_rows, 3}, number, 30), labels};
  if (name == "channels_last")
    return {pattern({batch_rows, 3, 4, 4}, number, 1).contiguous(at::MemoryFormat::ChannelsLast),
            labels};
  return {pattern({batch_rows, 12}, number, 1), labels};
}

/// The module of a case, with its initial values.
inline std::shared_ptr<Net> make_net(const std::string& name) {
  using namespace ::torch::nn;
  const auto net = std::make_shared<Net>();
  if (name == "sparse") {
    auto table = net->register_module("table", Embedding(EmbeddingOptions(30, 12).sparse(true)));
    auto last = net->register_module("last", Linear(12, 5));
    net->run = [=](const at::Tensor& x) mutable {
      return last->forward(table->forward(x).mean(1));
    };
  } else if (name == "channels_last") {
    auto filter = net->register_module("filter", Conv2d(Conv2dOptions(3, 4, 3).padding(1)));
    auto last = net->register_module("last", Linear(64, 5));
    filter->weight.set_data(filter->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    net->run = [=](const at::Tensor& x) mutable {
      return last->forward(at::tanh(filter->forward(x)).flatten(1));
    };
  } else if (name == "tied") {
    auto first = net->register_module("first", Linear(12, 12));
    auto last = net->register_module("last", Linear(12, 5));
    const at::Tensor weight = net->register_parameter("weight", first->weight);
    net->run = [=](const at::Tensor& x) mutable {
      const at::Tensor hidden = at::tanh(first->forward(x));
      return last->forward(at::tanh(at::linear(hidden, weight)));
    };
  } else {
    auto first = net->register_module("first", Linear(12, 16));
    BatchNorm1d norm(nullptr);
    if (name == "norm") norm = net->register_module("norm", BatchNorm1d(16));
    auto last = net->register_module("last", Linear(16, 5));
    if (name == "frozen") first->bias.requires_grad_(false);
    net->run = [=](const at::Tensor& x) mutable {
      const at::Tensor hidden = first->forward(x);
      return last->forward(at::tanh(norm.is_empty() ? hidden : norm->forward(hidden)));
    };
  }
  set_initial_values(*net);
  return net;
}

/// Adds the square of the loss's gradient by the inputs, whose derivative goes through backward.
inline at::Tensor penalized(Net& net, const Batch& batch) {
  const at::Tensor inputs = batch.inputs.detach().clone().requires_grad_();
  const at::Tensor loss = at::cross_entropy_loss(net.forward(inputs), batch.labels);
  const auto slopes = ::torch::autograd::grad({loss}, {inputs}, {}, true, true);
  return loss + 4 * slopes[0].square().sum();
}

inline Model make_model(const std::string& name) {
  return Model(make_net(name), name == "penalty" ? LossOf(penalized) : LossOf(cross_entropy));
}

}  // namespace torch_tests
