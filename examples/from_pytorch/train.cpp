// SPDX-License-Identifier: Apache-2.0
// ./train --ranks 2 --epochs 3, and then --epochs 6 --resume
#include <torch/torch.h>

#include <cstdio>
#include <limits>
#include <string>

#include "lockstep/torch_checkpoint.hpp"
#include "lockstep/torch_optim.hpp"

using torch::nn::Sequential;

struct Waves : torch::data::datasets::Dataset<Waves> {
  torch::Tensor x = torch::randn({128, 10}, at::make_generator<at::CPUGeneratorImpl>(0));
  torch::Tensor y = x.sum(1, true).sin();
  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<std::int64_t>(index);
    return {x[i], y[i]};
  }
  torch::optional<std::size_t> size() const override { return 96; }  // the others are for tests
};

void train(lockstep::Session& session) {
  const std::size_t epochs = session.option("epochs", 3u);
  const bool resumes = session.option("resume", false);
  const std::string folder = session.option("folder", std::string("."));
  const std::string last = folder + "/last.safetensors", best = folder + "/best.safetensors";

  const torch::Tensor x = Waves().x.slice(0, 96), y = Waves().y.slice(0, 96);
  auto dataset = Waves().map(torch::data::transforms::Stack<>());
  lockstep::torch::RankSampler<> sampler(*dataset.size(), session);
  auto loader = torch::data::make_data_loader(std::move(dataset), sampler, 8);
  torch::manual_seed(1);
  Sequential net(torch::nn::Linear(10, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1));
  lockstep::torch::DistributedDataParallel ddp(net, session);
  lockstep::torch::ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(
      net->parameters(), ddp, torch::optim::AdamOptions(1e-2));
  torch::optim::StepLR scheduler(optimizer, 2, 0.5);
  scheduler.step();  // Python's constructor does it
  std::size_t epoch = 0;
  double best_loss = std::numeric_limits<double>::infinity();
  lockstep::torch::Checkpoint checkpoint(ddp);
  checkpoint.add("optimizer", optimizer).add("scheduler", scheduler);
  checkpoint.add("epoch", epoch).add("best_loss", best_loss);
  if (resumes) checkpoint.load(last);

  while (epoch < epochs) {
    sampler.set_epoch(epoch);
    for (auto& [inputs, labels] : *loader) {
      optimizer.zero_grad();
      torch::mse_loss(ddp(inputs), labels).backward();
      optimizer.step();
    }
    scheduler.step();
    ++epoch;
    const torch::NoGradGuard no_grad;
    const auto loss = torch::mse_loss(net->forward(x), y).item<double>();
    const bool is_best = loss < best_loss;
    best_loss = std::min(loss, best_loss);
    checkpoint.save(last);  // all ranks
    if (session.rank() != lockstep::Rank{0}) continue;
    std::printf("epoch %zu loss %.9g\n", epoch, loss);
    if (is_best) lockstep::save_state_dict(net, best);
  }
  if (session.rank() == lockstep::Rank{0}) std::printf("best %.9g\n", best_loss);
}

int main(int argc, char** argv) { return lockstep::launch(argc, argv, train); }
