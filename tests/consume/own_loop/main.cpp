// SPDX-License-Identifier: Apache-2.0
// Two spirals, told apart by a small network: a loop of the program's own, with two micro-batches
// a step, clipped gradients, an evaluation on rank 0 and a file of the module at the end.
#include <torch/data.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <cstdio>
#include <lockstep/torch.hpp>
#include <memory>

struct Spirals : torch::data::datasets::Dataset<Spirals> {
  torch::Tensor turns = torch::linspace(0.2, 1.0, 200).repeat({2}).unsqueeze(1);
  torch::Tensor classes = torch::arange(400).div(200, "floor");
  torch::Tensor angles = 6 * turns + 3.14159 * classes.unsqueeze(1);
  torch::Tensor points = turns * torch::cat({angles.cos(), angles.sin()}, 1);
  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<std::int64_t>(index);
    return {points[i], classes[i]};
  }
  torch::optional<std::size_t> size() const override { return 400; }
};

struct Net : torch::nn::Module {
  torch::nn::Linear in = register_module("in_", torch::nn::Linear(2, 64));
  torch::nn::Linear middle = register_module("middle", torch::nn::Linear(64, 64));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(64, 2));
  torch::Tensor forward(torch::Tensor x) {
    return out(torch::tanh(middle(torch::tanh(in(4 * x)))));
  }
};

void train(lockstep::Session& session) {
  torch::manual_seed(3);
  const auto net = std::make_shared<Net>();
  lockstep::torch::DistributedDataParallel<Net> ddp(net, session);
  torch::optim::AdamW optimizer(net->parameters(), 1e-2);
  const Spirals spirals;
  auto data = Spirals().map(torch::data::transforms::Stack<>());
  lockstep::torch::RankSampler<> sampler(*data.size(), session);
  auto loader = torch::data::make_data_loader(std::move(data), sampler, 25);
  for (std::size_t epoch = 0; epoch != 30; ++epoch) {
    sampler.set_epoch(epoch);
    bool is_second = false;  // of the two micro-batches of a step
    for (auto& batch : *loader) {
      const auto loss_of = [&] {
        return torch::cross_entropy_loss(ddp(batch.data), batch.target) / 2;
      };
      if (!is_second) {
        const auto local = ddp.no_sync();
        ddp.backward(loss_of());
      } else {
        ddp.backward(loss_of());
        torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
        optimizer.step();
        optimizer.zero_grad();
      }
      is_second = !is_second;
    }
  }
  if (session.rank() != lockstep::Rank{0}) return;
  lockstep::save_state_dict(*net, "spirals.safetensors");
  Net read;
  lockstep::load_state_dict(read, "spirals.safetensors");
  const torch::NoGradGuard no_gradients;
  const auto right = read.forward(spirals.points).argmax(1).eq(spirals.classes);
  std::printf("accuracy %.3f\n", right.to(torch::kDouble).mean().item<double>());
}

int main(int argc, char** argv) { return lockstep::launch(argc, argv, train); }
