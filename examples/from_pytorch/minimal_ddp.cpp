// SPDX-License-Identifier: Apache-2.0
// ./minimal_ddp --ranks 2, or torchrun --no-python --nproc-per-node 2 ./minimal_ddp
#include <torch/torch.h>

#include <cstdio>

#include "lockstep/torch.hpp"

struct Points : torch::data::datasets::Dataset<Points> {
  torch::Tensor x = torch::randn({100, 10}, at::make_generator<at::CPUGeneratorImpl>(0));
  torch::Tensor y = x.sum(1, true);
  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<std::int64_t>(index);
    return {x[i], y[i]};
  }
  torch::optional<std::size_t> size() const override { return 100; }
};

void train(lockstep::Session& session) {
  auto dataset = Points().map(torch::data::transforms::Stack<>());
  lockstep::torch::RankSampler<> sampler(*dataset.size(), session);
  auto loader = torch::data::make_data_loader(std::move(dataset), sampler, 4);
  torch::manual_seed(1);
  torch::nn::Linear net(10, 1);
  lockstep::torch::DistributedDataParallel ddp(net, session);
  torch::optim::SGD optimizer(net->parameters(), 0.05);

  for (std::size_t epoch = 0; epoch != 3; ++epoch) {
    sampler.set_epoch(epoch);
    torch::Tensor loss;
    for (auto& [inputs, labels] : *loader) {
      optimizer.zero_grad();
      loss = torch::mse_loss(ddp(inputs), labels);
      loss.backward();
      optimizer.step();
    }
    if (session.rank() == lockstep::Rank{0})
      std::printf("epoch %zu loss %.9g\n", epoch, loss.item<double>());
  }
}

int main(int argc, char** argv) { return lockstep::launch(argc, argv, train); }
