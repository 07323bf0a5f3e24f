// SPDX-License-Identifier: Apache-2.0
// ./groups --ranks 4
#include <torch/torch.h>

#include <cstdio>

#include "lockstep/gloo.hpp"
#include "lockstep/torch.hpp"

using lockstep::Backend, lockstep::Gloo, lockstep::Rank;

void train(lockstep::Session& session) {
  lockstep::ProcessGroup group(session);  // shared memory
  const std::size_t rank = group.rank().value(), world_size = group.world_size().value();
  auto low = lockstep::new_group<Backend<Gloo>>(group, {Rank{0}, Rank{1}});
  auto high = lockstep::new_group<Backend<Gloo>>(group, {Rank{2}, Rank{3}});
  auto& half = low ? low : high;
  torch::manual_seed(1);
  torch::nn::Linear net(10, 1);
  lockstep::torch::DistributedDataParallel ddp(net, group);  // over all ranks
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  const auto x = torch::randn({64, 10}, at::make_generator<at::CPUGeneratorImpl>(0));
  const torch::Tensor inputs = x.chunk(world_size)[rank];
  for (int step = 0; step != 10; ++step) {
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(ddp(inputs), inputs.sum(1, true));
    loss.backward();
    optimizer.step();
    const auto sum = half->all_reduce(loss.item<float>());  // within the half
    if (half->rank() == Rank{0})
      std::printf("half %zu step %d loss %.9g\n", rank / 2, step, sum / 2);
  }
}

int main(int argc, char** argv) { return lockstep::launch(argc, argv, train); }
