// SPDX-License-Identifier: Apache-2.0
// Replicas of a module in one process train like the module on the whole batch: in a program's own
// loop, and under ParallelStrategy<DP>.
#include "lockstep/detail/torch/data_parallel.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/detail/torch/model.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "torch/small_net.hpp"

BOOST_AUTO_TEST_SUITE(torch_data_parallel)

namespace {

using namespace torch_net;
namespace loops = lockstep::torch;
using lockstep::TorchModel;

struct NormNet : torch::nn::Cloneable<NormNet> {
  torch::nn::Linear in{nullptr}, out{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};

  void reset() override {
    in = register_module("in", torch::nn::Linear(5, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    out = register_module("out", torch::nn::Linear(6, 2));
  }
  NormNet() { reset(); }
  at::Tensor forward(const at::Tensor& x) { return out(at::tanh(norm(in(x)))); }
};

/// A layer that knows how often it was called.
struct Counting : torch::nn::Cloneable<Counting> {
  torch::nn::Linear layer{nullptr};
  at::Tensor calls;

  void reset() override {
    layer = register_module("layer", torch::nn::Linear(5, 5));
    calls = register_buffer("calls", at::zeros({1}));
  }
  Counting() { reset(); }
  at::Tensor forward(const at::Tensor& x) {
    calls.add_(1);
    return layer(x) / (1 + calls);
  }
};

/// A layer that is there twice, and whose weight and count are also the module's own: in LibTorch's
/// `clone()` they are others.
struct TiedNet : torch::nn::Cloneable<TiedNet> {
  std::shared_ptr<Counting> in, again;
  torch::nn::Linear out{nullptr};
  at::Tensor weight, calls;

  void reset() override {
    in = register_module("first", std::make_shared<Counting>());
    again = register_module("again", in);
    out = register_module("out", torch::nn::Linear(5, 2));
    weight = register_parameter("weight", in->layer->weight);
    calls = register_buffer("calls", in->calls);
  }
  TiedNet() { reset(); }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor inner = at::tanh(again->forward(at::tanh(in->forward(x))));
    return out(at::tanh(at::linear(inner, weight))) / (1 + calls);
  }
  /// Each once: an optimizer would make several steps with a tensor that it has several times.
  std::vector<at::Tensor> each_once() const {
    return {in->layer->weight, in->layer->bias, out->weight, out->bias};
  }
};

/// A layer that notes where the rows are that its replicas are given. It has no parameters:
/// LibTorch moves none to the device `meta`.
struct Noting : torch::nn::Cloneable<Noting> {
  std::shared_ptr<std::map<std::string, std::int64_t>> rows =
      std::make_shared<std::map<std::string, std::int64_t>>();
  std::shared_ptr<std::mutex> mutex = std::make_shared<std::mutex>();

  void reset() override {}
  at::Tensor forward(const at::Tensor& x) {
    const std::lock_guard lock(*mutex);
    (*rows)[x.device().str()] += x.size(0);
    return 2 * x;
  }
};

/// Largest difference of two modules' gradients.
double gradients_apart(const torch::nn::Module& a, const torch::nn::Module& b) {
  double apart = 0;
  const auto as = a.parameters(), bs = b.parameters();
  for (std::size_t i = 0; i != as.size(); ++i) {
    BOOST_TEST(as[i].grad().defined() == bs[i].grad().defined());
    if (!as[i].grad().defined()) continue;
    apart = std::max(apart, (as[i].grad() - bs[i].grad()).abs().max().item<double>());
  }
  return apart;
}

/// A batch that DP can cut.
struct Rows {
  at::Tensor inputs;
  std::size_t size() const { return static_cast<std::size_t>(inputs.size(0)); }
  Rows slice(std::size_t first, std::size_t count) const {
    return {inputs.narrow(0, static_cast<std::int64_t>(first), static_cast<std::int64_t>(count))};
  }
};
template <class N>
struct RowModel : TorchModel<RowModel<N>, N> {
  using TorchModel<RowModel, N>::TorchModel;
  at::Tensor loss(const Rows& rows) { return loss_of(this->module().forward(rows.inputs)); }
};

/// The pass of NormNet on shares of a batch, by hand: the running statistics of the first count.
at::Tensor forward_by_hand(NormNet& net, const at::Tensor& x, std::size_t replicas) {
  const auto shares = x.chunk(static_cast<std::int64_t>(replicas));
  std::vector<at::Tensor> outputs(shares.size());
  const at::Tensor mean = net.norm->running_mean.clone(), variance = net.norm->running_var.clone();
  const at::Tensor count = net.norm->num_batches_tracked.clone();
  for (std::size_t i = shares.size(); i-- != 0;) {
    const at::NoGradGuard quiet;
    net.norm->running_mean.data().copy_(mean);
    net.norm->running_var.data().copy_(variance);
    net.norm->num_batches_tracked.data().copy_(count);
    const at::AutoGradMode again(true);
    outputs[i] = net.forward(shares[i]);
  }
  return at::cat(outputs);
}

}  // namespace

BOOST_AUTO_TEST_CASE(outputs_and_gradients_are_those_of_the_module) {
  for (const std::size_t replicas : {1u, 2u, 3u, 4u}) {
    auto alone = make_net(), net = make_net();
    loops::DataParallel dp(net, replicas);
    torch::optim::SGD plain(alone->parameters(), 0.1), optimizer(net->parameters(), 0.1);
    BOOST_TEST(dp.replicas() == replicas);
    for (std::size_t s = 0; s != 4; ++s) {
      const at::Tensor x = inputs_of(s, 0, 9);
      const at::Tensor y = dp(x, s != 2);
      const at::Tensor expected = alone->forward(x, s != 2);
      BOOST_TEST(at::allclose(y, expected, 1e-5, 1e-6));
      loss_of(y).backward();
      loss_of(expected).backward();
      BOOST_TEST(gradients_apart(*net, *alone) < 1e-6);
      plain.step();
      optimizer.step();
      plain.zero_grad(s % 2 == 0);
      optimizer.zero_grad(s % 2 == 0);
      require_close(*net, *alone, "after an update");
    }
  }
}

BOOST_AUTO_TEST_CASE(gradients_of_gradients_are_those_of_the_module) {
  using torch::autograd::grad;
  auto alone = make_net(), net = make_net();
  loops::DataParallel dp(net, 3);
  const auto penalise = [](Net& each, auto&& forward) {
    const at::Tensor x = inputs_of(1, 0, 7).requires_grad_();
    const at::Tensor y = forward(x);
    const at::Tensor slope = grad({y.sum()}, {x}, {}, true, true)[0];
    const auto of = grad({loss_of(y)}, {each.in->weight, each.out->weight}, {}, true, true);
    (loss_of(y) + slope.pow(2).mean() + of[0].pow(2).sum() + of[1].pow(2).sum()).backward();
  };
  penalise(*net, dp);
  penalise(*alone, [&](const at::Tensor& x) { return alone->forward(x); });
  BOOST_TEST(net->in->weight.grad().abs().max().item<float>() > 0);
  BOOST_TEST(gradients_apart(*net, *alone) < 1e-6);
}

BOOST_AUTO_TEST_CASE(running_statistics_are_the_first_replicas) {
  for (const std::size_t replicas : {1u, 2u, 4u}) {
    auto alone = make_net<NormNet>(), net = make_net<NormNet>();
    loops::DataParallel dp(net, replicas);
    torch::optim::SGD plain(alone->parameters(), 0.1), optimizer(net->parameters(), 0.1);
    for (std::size_t s = 0; s != 4; ++s) {
      const at::Tensor x = inputs_of(s, 0, 8);
      loss_of(dp(x)).backward();
      loss_of(forward_by_hand(*alone, x, replicas)).backward();
      BOOST_TEST(gradients_apart(*net, *alone) < 1e-6);
      plain.step();
      optimizer.step();
      plain.zero_grad();
      optimizer.zero_grad();
      BOOST_TEST(at::allclose(net->norm->running_mean, alone->norm->running_mean, 1e-5, 1e-6));
      BOOST_TEST(at::allclose(net->norm->running_var, alone->norm->running_var, 1e-5, 1e-6));
      BOOST_TEST(net->norm->num_batches_tracked.item<std::int64_t>() ==
                 static_cast<std::int64_t>(s) + 1);
    }
    net->eval();
    alone->eval();
    const at::NoGradGuard quiet;
    const at::Tensor x = inputs_of(9, 0, 8);
    const at::Tensor y = dp(x);
    BOOST_TEST(at::allclose(y, alone->forward(x), 1e-5, 1e-6));
    BOOST_TEST(!y.requires_grad());
  }
}

BOOST_AUTO_TEST_CASE(tied_parameters_stay_tied_in_replicas) {
  for (const std::size_t replicas : {1u, 2u, 3u}) {
    auto alone = make_net<TiedNet>(), net = make_net<TiedNet>();
    loops::DataParallel dp(net, replicas);
    torch::optim::SGD plain(alone->each_once(), 0.2), optimizer(net->each_once(), 0.2);
    for (std::size_t s = 0; s != 4; ++s) {
      const at::Tensor x = inputs_of(s, 0, 9);
      loss_of(dp(x)).backward();
      loss_of(alone->forward(x)).backward();
      BOOST_TEST(gradients_apart(*net, *alone) < 1e-6);
      plain.step();
      optimizer.step();
      plain.zero_grad();
      optimizer.zero_grad();
      require_close(*net, *alone, "tied");
    }
  }
}

BOOST_AUTO_TEST_CASE(a_torch_model_with_tied_parameters_trains_under_dp_like_one_process) {
  for (const std::size_t replicas : {1u, 2u, 4u}) {
    auto alone = make_net<TiedNet>();
    torch::optim::SGD plain(alone->each_once(), 0.2);
    lockstep::DataParallel<RowModel<TiedNet>> dp({.replicas = replicas},
                                                 RowModel<TiedNet>(make_net<TiedNet>()));
    dp.optimizer().lr = 0.2;
    for (std::size_t s = 0; s != 4; ++s) {
      const Rows rows{inputs_of(s, 0, 9)};
      loss_of(alone->forward(rows.inputs)).backward();
      plain.step();
      plain.zero_grad();
      dp.step(rows);
      require_close(dp.model().module(), *alone, "tied");
    }
  }
}

BOOST_AUTO_TEST_CASE(values_that_are_replaced_reach_all_replicas) {
  auto net = make_net(), other = make_net(8);
  loops::DataParallel dp(net, 3);
  dp(inputs_of(0, 0, 6));
  for (auto& each : net->named_parameters())
    each.value().set_data(other->named_parameters()[each.key()].detach().clone());
  const at::Tensor x = inputs_of(1, 0, 6);
  BOOST_TEST(at::allclose(dp(x), other->forward(x), 1e-5, 1e-6));
}

BOOST_AUTO_TEST_CASE(holders_and_several_outputs_and_numbers_are_gathered) {
  torch::nn::Sequential net(torch::nn::Linear(5, 2));
  loops::DataParallel dp(net, std::vector<at::Device>{at::kCPU, at::kCPU});
  BOOST_TEST(dp(inputs_of(0, 0, 5)).size(0) == 5);
  loops::DataParallel by_number(net, 2);  // an int, and Sequential is made from pointers too
  BOOST_TEST(by_number.replicas() == 2u);

  struct Two : torch::nn::Cloneable<Two> {
    torch::nn::Linear in{nullptr};
    Two() { reset(); }
    void reset() override { in = register_module("in", torch::nn::Linear(5, 2)); }
    std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& scale) {
      const at::Tensor y = in(x)*scale;
      return {y, y.sum()};
    }
  };
  loops::DataParallel two(std::make_shared<Two>(), 2);
  const auto [rows, sums] = two(inputs_of(0, 0, 5), at::scalar_tensor(2));
  BOOST_TEST(rows.size(0) == 5);
  BOOST_TEST(sums.numel() == 2);
  BOOST_TEST(at::allclose(sums.sum(), rows.sum(), 1e-4, 1e-5));
}

BOOST_AUTO_TEST_CASE(outputs_are_on_the_output_device_and_gradients_come_back) {
  // The device `meta` has no values, but outputs go there.
  struct Shapes : torch::nn::Cloneable<Shapes> {
    torch::nn::Linear in{nullptr};
    Shapes() { reset(); }
    void reset() override { in = register_module("in", torch::nn::Linear(5, 2)); }
    std::tuple<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x) {
      const at::Tensor y = in(x);
      return {y, {y.sum(), y}};
    }
  };
  const at::Device meta(at::kMeta);
  for (const std::size_t replicas : {1u, 3u}) {
    auto net = std::make_shared<Shapes>();
    loops::DataParallel near(net, replicas), by_name(net, replicas, at::Device("cpu:0"));
    BOOST_TEST(near.output_device() == at::Device(at::kCPU));
    BOOST_TEST(by_name.output_device() == at::Device(at::kCPU));
    BOOST_TEST(std::get<0>(near(inputs_of(0, 0, 6))).device() == at::Device(at::kCPU));
    loops::DataParallel dp(net, std::vector<at::Device>(replicas, at::kCPU), meta);
    BOOST_TEST(dp.output_device() == meta);
    BOOST_TEST(dp.replicas() == replicas);
    for (const std::int64_t rows : {6, 1}) {
      const auto [y, more] = dp(inputs_of(0, 0, rows));
      BOOST_TEST(y.device() == meta);
      BOOST_TEST(y.size(0) == rows);
      for (const at::Tensor& each : more) BOOST_TEST(each.device() == meta);
    }
  }
  auto alone = make_net(), net = make_net();
  loops::DataParallel dp(net, 3, at::Device(at::kCPU));
  loss_of(dp(inputs_of(0, 0, 7))).backward();
  loss_of(alone->forward(inputs_of(0, 0, 7))).backward();
  BOOST_TEST(gradients_apart(*net, *alone) < 1e-6);
}

BOOST_AUTO_TEST_CASE(replicas_run_on_the_devices_of_the_list) {
  auto net = std::make_shared<Noting>();
  const at::Device meta(at::kMeta);  // without values, so the outputs can be gathered only there
  loops::DataParallel dp(net, std::vector<at::Device>{at::kCPU, meta, at::kCPU}, meta);
  BOOST_TEST(dp.replicas() == 3u);
  const at::Tensor y = dp(inputs_of(0, 0, 7));
  BOOST_TEST(y.device() == meta);
  BOOST_TEST(y.size(0) == 7);
  const std::map<std::string, std::int64_t> expected{{"cpu", 4}, {"meta", 3}};
  BOOST_TEST((*net->rows == expected));
}

BOOST_AUTO_TEST_CASE(without_a_number_there_is_a_replica_for_each_gpu) {
  auto net = make_net();
  loops::DataParallel dp(net);  // on a CPU
  BOOST_TEST(dp.replicas() == 1u);
  BOOST_TEST(at::equal(dp(inputs_of(0, 0, 4)), net->forward(inputs_of(0, 0, 4))));
  torch::nn::Sequential holder(torch::nn::Linear(5, 2));
  BOOST_TEST(loops::DataParallel(holder).replicas() == 1u);
  struct Elsewhere : torch::nn::Module {
    at::Tensor w = register_parameter("w", at::empty(5, at::kMeta));
    at::Tensor forward(const at::Tensor& x) { return x * w; }
  };
  BOOST_CHECK_EXCEPTION(
      loops::DataParallel(std::make_shared<Elsewhere>(), std::vector<at::Device>{at::kCPU}),
      lockstep::Error, [](const lockstep::Error& error) {
        return std::string(error.what()).find("lies on meta and the first device is cpu") !=
               std::string::npos;
      });
}

BOOST_AUTO_TEST_CASE(a_replica_that_throws_and_modules_that_cannot_be_copied_are_told) {
  struct Bad : torch::nn::Cloneable<Bad> {
    at::Tensor w;
    Bad() { reset(); }
    void reset() override { w = register_parameter("w", at::ones(5)); }
    at::Tensor forward(const at::Tensor& x) {
      if (x[0][0].item<float>() == 7) throw std::runtime_error("no luck today");
      return x * w;
    }
  };
  loops::DataParallel dp(std::make_shared<Bad>(), 2);
  at::Tensor x = at::zeros({4, 5});
  dp(x);
  x[2][0] = 7;
  BOOST_CHECK_EXCEPTION(dp(x), std::runtime_error, [](const std::runtime_error& error) {
    return std::string(error.what()) == "no luck today";
  });
  struct Plain : torch::nn::Module {
    at::Tensor w = register_parameter("w", at::ones(5));
    at::Tensor forward(const at::Tensor& y) { return y * w; }
  };
  BOOST_CHECK_EXCEPTION(loops::DataParallel(std::make_shared<Plain>(), 2), lockstep::Error,
                        [](const lockstep::Error& error) {
                          return std::string(error.what()).find("torch::nn::Cloneable") !=
                                 std::string::npos;
                        });
}

BOOST_AUTO_TEST_CASE(a_torch_model_trains_under_dp_like_one_process) {
  for (const std::size_t replicas : {1u, 2u, 4u}) {
    auto alone = make_net();
    torch::optim::SGD plain(alone->parameters(), 0.1);
    lockstep::DataParallel<RowModel<Net>> dp({.replicas = replicas}, RowModel<Net>(make_net()));
    dp.optimizer().lr = 0.1;
    for (std::size_t s = 0; s != 4; ++s) {
      const Rows rows{inputs_of(s, 0, 9)};
      const at::Tensor loss = loss_of(alone->forward(rows.inputs));
      loss.backward();
      plain.step();
      plain.zero_grad();
      BOOST_TEST(std::abs(dp.step(rows) - loss.item<double>()) < 1e-6);
      require_close(dp.model().module(), *alone, "dp");
    }
  }
}

BOOST_AUTO_TEST_CASE(a_torch_model_with_batch_norms_trains_under_dp_as_by_hand) {
  for (const std::size_t replicas : {1u, 2u, 4u}) {
    auto alone = make_net<NormNet>();
    torch::optim::SGD plain(alone->parameters(), 0.1);
    lockstep::DataParallel<RowModel<NormNet>> dp({.replicas = replicas},
                                                 RowModel<NormNet>(make_net<NormNet>()));
    dp.optimizer().lr = 0.1;
    for (std::size_t s = 0; s != 4; ++s) {
      const Rows rows{inputs_of(s, 0, 8)};
      loss_of(forward_by_hand(*alone, rows.inputs, replicas)).backward();
      plain.step();
      plain.zero_grad();
      dp.step(rows);
      require_close(dp.model().module(), *alone, "dp");
    }
    const Rows rows{inputs_of(9, 0, 8)};
    alone->eval();
    BOOST_TEST(std::abs(dp.evaluate(rows) - loss_of(alone->forward(rows.inputs)).item<double>()) <
               1e-6);
    BOOST_TEST(dp.model().module().is_training());
  }
}

BOOST_AUTO_TEST_SUITE_END()
