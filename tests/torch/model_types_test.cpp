// SPDX-License-Identifier: Apache-2.0
// Parameters of several types, and some that a loss does not use, against LibTorch in one process.
#include <ATen/ATen.h>
#include <torch/autograd.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/torch/autocast.hpp"
#include "torch/cases.hpp"
#include "torch/model_ranks.hpp"

BOOST_AUTO_TEST_SUITE(torch_model_types)

namespace {

using namespace torch_tests;

/// Parameters of two types, which travel in buckets of their own.
struct Mixed : TorchModel<Mixed, Net, float, double> {
  explicit Mixed(std::shared_ptr<Net> net) : TorchModel(std::move(net)) {}
  at::Tensor loss(const Batch& batch) { return cross_entropy(module(), batch); }
};

std::shared_ptr<Net> mixed_net() {
  const auto net = std::make_shared<Net>();
  auto first = net->register_module("first", ::torch::nn::Linear(12, 16));
  auto last = net->register_module("last", ::torch::nn::Linear(16, 5));
  last->to(at::kDouble);
  net->run = [=](const at::Tensor& x) mutable {
    return last->forward(at::tanh(first->forward(x)).to(at::kDouble));
  };
  set_initial_values(*net);
  return net;
}

/// Products in 16 bits, and all else in floats.
struct Casting : TorchModel<Casting, Net> {
  explicit Casting(std::shared_ptr<Net> net) : TorchModel(std::move(net)) {}
  at::Tensor loss(const Batch& batch) { return loss_of(module(), batch); }
  static at::Tensor loss_of(Net& net, const Batch& batch) {
    const Autocast in_bf16(at::kCPU);
    const at::Tensor outputs = net.forward(batch.inputs);
    require(outputs.scalar_type() == at::kBFloat16, "products are not in 16 bits");
    return at::cross_entropy_loss(outputs.to(at::kFloat), batch.labels);
  }
};

/// Has no gradient in some steps.
struct Silent : ::torch::autograd::Function<Silent> {
  static at::Tensor forward(::torch::autograd::AutogradContext* context, const at::Tensor& x,
                            bool is_silent) {
    context->saved_data["silent"] = is_silent;
    return x.clone();
  }
  static ::torch::autograd::variable_list backward(
      ::torch::autograd::AutogradContext* context,
      const ::torch::autograd::variable_list& gradients) {
    const bool is_silent = context->saved_data["silent"].toBool();
    return {is_silent ? at::Tensor() : gradients[0], at::Tensor()};
  }
};

/// Trains on ranks, and in one process with LibTorch's SGD.
template <class M>
void expect_as_alone(const auto& make, const auto& loss_of) {
  for (const std::size_t world : {1u, 2u}) {
    all_well(world, [&](Shared& comm) {
      const auto net = make();
      const auto plain = make();
      DistributedDataParallel<M> ddp(comm, M(net));
      ddp.optimizer().lr = 0.125;
      ::torch::optim::SGD optimizer(plain->parameters(), 0.125);
      const auto ranks = static_cast<double>(comm.world_size().value());
      for (std::size_t s = 0; s != 10; ++s) {
        ddp.step(batch_of("plain", s, comm.rank().value()));
        optimizer.zero_grad();
        for (std::size_t rank = 0; rank != comm.world_size().value(); ++rank)
          (loss_of(*plain, batch_of("plain", s, rank)) / ranks).backward();
        optimizer.step();
      }
      for (const auto& [name, have] : net->named_parameters().pairs()) {
        const at::Tensor want = plain->named_parameters()[name];
        require(have.scalar_type() == want.scalar_type(), name + " has another type");
        require((have - want).abs().max().template item<double>() < 1e-6,
                name + " has other values");
      }
    });
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_gradient_that_autograd_leaves_undefined_is_zero) {
  all_well(2, [](Shared& comm) {
    const auto net = make_net("plain");
    const at::Tensor spare = net->register_parameter("spare", at::ones({7}));
    bool is_silent = false;
    const auto loss = [&](Net& module, const Batch& batch) {
      return cross_entropy(module, batch) + Silent::apply(spare, is_silent).sum();
    };
    DistributedDataParallel<Model> ddp(comm, Model(net, loss));
    ddp.optimizer().lr = 0.25;
    for (const double left : {0.75, 0.75, 0.5}) {
      ddp.step(batch_of("plain", 0, 0));
      ddp.for_each_parameter([](auto&&...) {});
      require(spare.eq(left).all().item<bool>(), "not " + std::to_string(left));
      is_silent = !is_silent;
    }
  });
}

BOOST_AUTO_TEST_CASE(unused_parameters_accumulation_and_clipping_are_as_in_one_process) {
  using Busy = DistributedDataParallel<Model, Optimizer<SGDMomentum>, UnusedParameters<Zero>,
                                       Accumulate<2>, Clip<0.05>>;
  for (const std::size_t world : {1u, 2u}) {
    all_well(world, [](Shared& comm) {
      const auto make = [] {
        const auto net = make_net("plain");
        net->register_parameter("spare", at::full({7}, 0.5));
        return net;
      };
      const auto net = make();
      Busy ddp(comm, Model(net));
      ddp.optimizer().lr = 0.5;
      const auto plain = make();
      ::torch::optim::SGD optimizer(plain->parameters(),
                                    ::torch::optim::SGDOptions(0.5).momentum(0.9));
      for (std::size_t s = 0; s != 8; ++s) {
        ddp.step(batch_of("plain", s, comm.rank().value()));
        for (std::size_t rank = 0; rank != comm.world_size().value(); ++rank)
          (cross_entropy(*plain, batch_of("plain", s, rank)) /
           static_cast<double>(2 * comm.world_size().value()))
              .backward();
        if (s % 2 == 0) continue;
        ::torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.05);
        optimizer.step();
        optimizer.zero_grad();
      }
      const std::vector<float> have = values_of(*net);
      const std::vector<float> want = values_of(*plain);
      for (std::size_t i = 0; i != want.size(); ++i)
        require(std::abs(have[i] - want[i]) < 1e-6, "value " + std::to_string(i) + " is " +
                                                        std::to_string(have[i]) + ", not " +
                                                        std::to_string(want[i]));
    });
  }
  all_say(run(1,
              [](Shared& comm) {
                const auto net = make_net("plain");
                net->register_parameter("spare", at::ones({7}));
                Ddp ddp(comm, Model(net));
                ddp.step(batch_of("plain", 0, 0));
              }),
          "spare");
}

BOOST_AUTO_TEST_CASE(parameters_of_two_types_train_together_as_in_one_process) {
  expect_as_alone<Mixed>(mixed_net, cross_entropy);
}

BOOST_AUTO_TEST_CASE(a_loss_in_16_bits_trains_floats_as_in_one_process) {
  expect_as_alone<Casting>([] { return make_net("plain"); }, Casting::loss_of);
}

BOOST_AUTO_TEST_SUITE_END()
