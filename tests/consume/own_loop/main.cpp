// SPDX-License-Identifier: Apache-2.0
// Learns to tell three spirals apart, on any number of ranks: spirals --ranks 2
// Started again after it was killed, it goes on with the epoch after the last whole one.

#include <torch/data.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>

#include <cmath>
#include <cstdint>
#include <cstdio>

#include "lockstep/torch.hpp"
#include "lockstep/torch_checkpoint.hpp"
#include "lockstep/torch_optim.hpp"

namespace {

constexpr std::int64_t arms = 3;
constexpr std::int64_t epochs = 20;
constexpr std::size_t batch_size = 32;  // of each rank

/// Points on spirals around the origin, with some noise, and the spiral of each. A seed always
/// gives the same points.
struct Spirals : torch::data::datasets::Dataset<Spirals> {
  torch::Tensor points;
  torch::Tensor labels;

  Spirals(std::int64_t count, std::uint64_t seed) {
    auto random = at::make_generator<at::CPUGeneratorImpl>(seed);
    labels = torch::arange(count) % arms;
    const torch::Tensor radius = torch::rand({count}, random).sqrt();
    const torch::Tensor angle = 9 * radius + labels * (2 * M_PI / arms);
    points = torch::stack({radius * angle.cos(), radius * angle.sin()}, 1);
    points += 0.02 * torch::randn({count, 2}, random);
  }
  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<std::int64_t>(index);
    return {points[i], labels[i]};
  }
  torch::optional<std::size_t> size() const override {
    return static_cast<std::size_t>(labels.size(0));
  }
};

torch::nn::Sequential make_net() {
  using namespace torch::nn;
  return Sequential(Linear(2, 64), BatchNorm1d(64), ReLU(),   //
                    Linear(64, 64), BatchNorm1d(64), ReLU(),  //
                    Linear(64, arms));
}

/// The part of the points whose spiral the net finds.
double accuracy(torch::nn::Sequential& net, const Spirals& data) {
  const torch::NoGradGuard no_grad;
  net->eval();
  const torch::Tensor found = net->forward(data.points).argmax(1);
  net->train();
  return found.eq(data.labels).to(torch::kDouble).mean().item<double>();
}

void train(lockstep::Session& session) {
  const bool is_first = session.rank() == lockstep::Rank{0};

  torch::manual_seed(1);
  torch::nn::Sequential net = make_net();
  lockstep::convert_sync_batchnorm(net);  // statistics over the samples of all ranks
  lockstep::torch::DistributedDataParallel ddp(net, session);

  // Every rank keeps the optimizer's states of a share of the parameters.
  lockstep::torch::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(
      net->parameters(), ddp, torch::optim::AdamWOptions(1e-2));
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/5, /*gamma=*/0.3);
  scheduler.step();  // Python's constructor makes this first step itself

  auto data = Spirals(8192, /*seed=*/1).map(torch::data::transforms::Stack<>());
  lockstep::torch::RankSampler<> sampler(*data.size(), session);
  auto loader = torch::data::make_data_loader(std::move(data), sampler, batch_size);

  std::int64_t epoch = 0;
  lockstep::torch::Checkpoint checkpoint(ddp);
  checkpoint.add("optimizer", optimizer).add("scheduler", scheduler);
  checkpoint.add("sampler", sampler).add("epoch", epoch);
  const char* const path = "spirals.safetensors";
  if (checkpoint.resume(path) && is_first)
    std::printf("goes on after epoch %lld\n", static_cast<long long>(epoch));

  while (epoch != epochs) {
    sampler.set_epoch(static_cast<std::size_t>(epoch));
    double sum = 0;  // of this rank's losses
    int batches = 0;
    for (auto& batch : *loader) {
      const torch::Tensor loss = torch::cross_entropy_loss(ddp(batch.data), batch.target);
      loss.backward();  // gradients are averages over all ranks when it returns
      optimizer.step();
      optimizer.zero_grad();
      sum += loss.item<double>();
      ++batches;
    }
    scheduler.step();
    ++epoch;
    checkpoint.save(path);  // all ranks call it, rank 0 writes
    if (is_first)
      std::printf("epoch %lld  loss %.5f\n", static_cast<long long>(epoch), sum / batches);
  }

  ddp.synchronize_buffers();  // the norms' running statistics
  if (is_first) std::printf("accuracy %.4f\n", accuracy(net, Spirals(4096, /*seed=*/2)));
}

}  // namespace

int main(int argc, char** argv) { return lockstep::launch(argc, argv, train); }
