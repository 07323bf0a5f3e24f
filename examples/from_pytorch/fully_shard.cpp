// SPDX-License-Identifier: Apache-2.0
// ./fully_shard --ranks 2
#include <torch/torch.h>

#include <cstdio>

#include "lockstep/gloo.hpp"
#include "lockstep/trainer.hpp"

using namespace lockstep;

/// x := x + relu(W x), four times. A module of LibTorch's holds all of its parameters; a declared
/// model asks for each when it needs it.
struct Stack {
  static constexpr std::size_t blocks = 4;
  using Block = ParameterList<Parameter<"weight", float, 16, 16>>;
  using Parameters = ParameterList<Repeat<"blocks", blocks, Block>>;

  static torch::Tensor tensor(const auto& view) {
    return torch::from_blob(const_cast<float*>(view.data_handle()), {16, 16});
  }
  static void each_block(const auto& f) {
    [&]<std::size_t... B>(std::index_sequence<B...>) {
      (f(std::integral_constant<std::size_t, B>{}), ...);
    }(std::make_index_sequence<blocks>{});
  }

  void initialize(auto& initial) {
    torch::manual_seed(1);
    initial.for_each_parameter([](auto, auto weight) { tensor(weight).normal_(0, 0.2); });
  }
  float forward(auto& step, const torch::Tensor& batch) {
    x[0] = batch;
    each_block([&]<std::size_t B>(std::integral_constant<std::size_t, B>) {
      const auto weight = tensor(step.param("blocks"_p / lockstep::at<B> / "weight"_p));
      relu[B] = torch::relu(torch::matmul(x[B], weight.t()));
      x[B + 1] = x[B] + relu[B];
    });
    return x[blocks].square().mean().item<float>();
  }
  void backward(auto& step, const torch::Tensor&) {
    torch::Tensor dx = x[blocks] * (2.0 / static_cast<double>(x[blocks].numel()));
    each_block([&]<std::size_t B>(std::integral_constant<std::size_t, B>) {
      constexpr std::size_t b = blocks - 1 - B;
      constexpr auto weight = "blocks"_p / lockstep::at<b> / "weight"_p;
      const torch::Tensor d = dx * relu[b].gt(0);
      tensor(step.grad(weight)).copy_(torch::matmul(d.t(), x[b]));
      dx += torch::matmul(d, tensor(step.param(weight)));
      step.ready(weight);
    });
  }

  std::array<torch::Tensor, blocks + 1> x;
  std::array<torch::Tensor, blocks> relu;
};

using Job =
    Trainer<Stack, Backend<Gloo>, Optimizer<AdamW>, Sharding<FullyShard, Units<"blocks.*">>>;

int main(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {
    const std::size_t rank = job.rank().value();
    job.optimizer().lr = 0.01;
    job.optimizer().weight_decay = 0.1;
    const auto x = torch::randn({32, 16}, at::make_generator<at::CPUGeneratorImpl>(0));
    const torch::Tensor batch = x.chunk(job.world_size().value())[rank];
    for (int step = 0; step != 10; ++step)
      std::printf("rank %zu step %d loss %.9g\n", rank, step, double{job.step(batch)});
  });
}
