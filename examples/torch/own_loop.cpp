// SPDX-License-Identifier: Apache-2.0
// An ordinary LibTorch program, with its own loop, LibTorch's optimizer and LibTorch's data loader,
// that trains on several ranks. The lines that one process would not need are marked.
//
//   ./own_loop --ranks 2
#include <torch/data.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <cstdio>
#include <memory>

#include "lockstep/torch.hpp"

/// Points on the unit square, and the height of a hill over each.
struct Hill : torch::data::datasets::Dataset<Hill> {
  torch::Tensor points = torch::rand({4096, 2}, at::make_generator<at::CPUGeneratorImpl>(1));
  torch::Tensor heights = torch::exp(-8 * (points - 0.5).square().sum(1, true));
  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<std::int64_t>(index);
    return {points[i], heights[i]};
  }
  torch::optional<std::size_t> size() const override { return 4096; }
};

struct Net : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(2, 32));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(32, 1));
  torch::Tensor forward(torch::Tensor x) { return last->forward(torch::tanh(first->forward(x))); }
};

void train(lockstep::Session& session) {
  torch::manual_seed(1);
  const auto net = std::make_shared<Net>();
  lockstep::torch::DistributedDataParallel<Net> ddp(net, session);  // 1: the module, on all ranks
  torch::optim::AdamW optimizer(net->parameters(), 1e-2);
  auto data = Hill().map(torch::data::transforms::Stack<>());
  lockstep::torch::RankSampler<> sampler(*data.size(), session);  // 2: each rank has its share
  auto loader = torch::data::make_data_loader(std::move(data), sampler, 32);
  for (std::size_t epoch = 0; epoch != 5; ++epoch) {
    sampler.set_epoch(epoch);  // 3: another order in every epoch
    double sum = 0;
    int batches = 0;
    for (auto& batch : *loader) {
      const torch::Tensor loss = torch::mse_loss(ddp(batch.data), batch.target);
      loss.backward();  // gradients are averages over all ranks when it returns
      optimizer.step();
      optimizer.zero_grad();
      sum += loss.item<double>();
      ++batches;
    }
    if (session.rank() == lockstep::Rank{0})
      std::printf("epoch %zu  loss %.5f\n", epoch + 1, sum / batches);
  }
  if (session.rank() == lockstep::Rank{0}) lockstep::save_state_dict(*net, "hill.safetensors");
}

int main(int argc, char** argv) {
  return lockstep::launch(argc, argv, train);  // 4: starts the ranks
}
