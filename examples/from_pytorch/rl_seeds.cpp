// SPDX-License-Identifier: Apache-2.0
// ./rl_seeds --ranks 2 --seed 7
#include <torch/torch.h>

#include <cstdio>

#include "lockstep/torch.hpp"

void train(lockstep::Session& session) {
  const auto seed = session.option("seed", std::uint64_t{7});
  lockstep::ProcessGroup group(session);
  torch::manual_seed(seed);  // the same initial values on all ranks
  torch::nn::Linear net(2, 4);
  lockstep::torch::DistributedDataParallel policy(net, group);
  torch::optim::SGD optimizer(net->parameters(), 0.5);
  auto rng =
      at::make_generator<at::CPUGeneratorImpl>(seed + group.rank().value());  // other episodes
  const auto pays = torch::tensor({{0.1f, 0.9f, 0.3f, 0.2f}, {0.8f, 0.1f, 0.2f, 0.4f}});

  for (int update = 0; update != 20; ++update) {
    const auto state = torch::randint(0, 2, {32}, rng, torch::kLong);
    const auto logits = policy(torch::one_hot(state, 2).to(torch::kFloat)).log_softmax(1);
    const auto action = torch::multinomial(logits.detach().exp(), 1, false, rng);
    const auto reward = pays.index({state}).gather(1, action) + 0.1 * torch::randn({32, 1}, rng);
    optimizer.zero_grad();
    (-(reward - reward.mean()) * logits.gather(1, action)).mean().backward();
    optimizer.step();
    const auto mean = group->all_reduce(reward.mean().item<float>(), lockstep::Average{});
    if (group.rank() == lockstep::Rank{0}) std::printf("update %d reward %.9g\n", update, mean);
  }
}

int main(int argc, char** argv) { return lockstep::launch(argc, argv, train); }
