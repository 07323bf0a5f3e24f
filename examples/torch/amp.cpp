// SPDX-License-Identifier: Apache-2.0
// Mixed precision in an ordinary LibTorch loop on several ranks: the loop of PyTorch's tutorial on
// automatic mixed precision, line by line. Here it computes in half precision on CPUs; on GPUs the
// wrapper has Device<Cuda> too, and Autocast is told at::kCUDA.
//
//   ./amp --ranks 2
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <cstdio>
#include <memory>

#include "lockstep/torch.hpp"

struct Net : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 32));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(32, 1));
  torch::Tensor forward(torch::Tensor x) { return last->forward(torch::tanh(first->forward(x))); }
};

/// A wrapper that lets infinite gradients pass: the scaler looks for them.
using Wrapper = lockstep::torch::DistributedDataParallel<Net, lockstep::Anomaly<lockstep::Ignore>>;

void train(lockstep::Session& session) {
  torch::manual_seed(1);
  const auto net = std::make_shared<Net>();
  Wrapper ddp(net, session);
  torch::optim::SGD opt(net->parameters(), 0.1);
  lockstep::torch::GradScaler scaler(ddp);
  torch::manual_seed(session.rank().value());  // each rank has samples of its own
  const torch::Tensor input = torch::randn({256, 8}), target = input.square().mean(1, true);
  int left_out = 0;
  for (int epoch = 0; epoch != 50; ++epoch) {
    torch::Tensor loss;
    {
      const lockstep::Autocast in_half(at::kCPU, at::kHalf);
      const torch::Tensor output = ddp(input);
      loss = torch::mse_loss(output.to(at::kFloat), target);
    }
    scaler.scale(loss).backward();
    scaler.unscale_(opt);  // only where gradients are clipped
    torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    if (!scaler.step(opt)) ++left_out;
    scaler.update();
    opt.zero_grad();
    if (session.rank() == lockstep::Rank{0} && (epoch + 1) % 10 == 0)
      std::printf("epoch %d  loss %.5f  scale %.0f  left out %d\n", epoch + 1, loss.item<double>(),
                  scaler.get_scale(), left_out);
  }
}

int main(int argc, char** argv) { return lockstep::launch(argc, argv, train); }
