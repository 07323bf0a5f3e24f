// SPDX-License-Identifier: Apache-2.0
// ./dp_flag --dp, or ./dp_flag --ranks 2
#include <torch/torch.h>

#include <cstdio>

#include "lockstep/torch.hpp"

using torch::nn::Sequential;

void train(lockstep::Session& session) {
  const bool is_dp = session.option("dp", false, "DataParallel in one process");
  const std::size_t rank = session.rank().value(), world_size = session.world().value();
  torch::manual_seed(1);
  Sequential net(torch::nn::Linear(10, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1));
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto x = torch::randn({64, 10}, at::make_generator<at::CPUGeneratorImpl>(0));
  const auto inputs = x.chunk(world_size)[rank];  // with DP the whole batch
  const torch::Tensor labels = inputs.sum(1, true);
  const auto run = [&](auto& model) {
    for (int step = 0; step != 10; ++step) {
      optimizer.zero_grad();
      torch::mse_loss(model(inputs), labels).backward();
      optimizer.step();
    }
  };
  if (is_dp) {
    lockstep::torch::DataParallel dp(net, 2);  // two replicas
    run(dp);
  } else {
    lockstep::torch::DistributedDataParallel ddp(net, session);
    run(ddp);
  }
  const auto weight = net->parameters()[0].sum().item<double>();
  if (rank == 0) std::printf("weight %.9g\n", weight);
}

int main(int argc, char** argv) { return lockstep::launch(argc, argv, train); }
