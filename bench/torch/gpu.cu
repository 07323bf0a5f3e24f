// SPDX-License-Identifier: Apache-2.0
// LibTorch modules on a GPU under lockstep, against the same modules under Python's DDP: a small
// network, whose steps are all overhead, and GPT-2 124M. An argument chooses a part: mlp or gpt2.
#include <cuda_runtime.h>

#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/torch.cuh"
#include "measure.hpp"
#include "step_times.hpp"
#include "table.hpp"
#include "timing.cuh"
#include "torch/gpt2.hpp"

namespace bench {
namespace {

using namespace lockstep;

/// A module and its loss, whatever they are: one type, so that all is compiled once.
struct Task : TorchModel<Task, ::torch::nn::Module> {
  using Loss = std::function<at::Tensor(const TensorBatch&)>;
  Task(std::shared_ptr<::torch::nn::Module> module, Loss loss)
      : TorchModel(std::move(module)), loss_of(std::move(loss)) {}
  at::Tensor loss(const TensorBatch& batch) { return loss_of(batch); }
  Loss loss_of;
};

/// A task and the batch that it is given again and again, which lies on the GPU already.
struct Work {
  std::function<Task()> make;
  TensorBatch batch;
  int steps;   // in a turn
  int rounds;  // before PyTorch's turn, and as many after it
};

Work mlp() {
  const auto make = [] {
    using namespace ::torch::nn;
    auto net = std::make_shared<SequentialImpl>(Linear(784, 256), ReLU(), Linear(256, 256), ReLU(),
                                                Linear(256, 10));
    return Task(net, [net](const TensorBatch& batch) {
      return lockstep::torch::cross_entropy(net->forward(batch.inputs), batch.labels);
    });
  };
  return {make,
          {at::randn({64, 784}, at::kCUDA), at::randint(10, {64}, at::kCUDA).to(at::kLong)},
          2000,
          5};
}

Work transformer() {
  const gpt2::Size size;
  const auto make = [size] {
    auto net = std::make_shared<gpt2::Gpt2>(size);
    return Task(net, [net](const TensorBatch& batch) {
      const Autocast in_bf16(at::kCUDA);
      return net->loss(batch.inputs, batch.labels);
    });
  };
  const auto tokens = [&] { return at::randint(50257, {16, 1024}, at::kCUDA).to(at::kLong); };
  return {make, {tokens(), tokens()}, 20, 3};
}

template <class... Policies>
class Contender {
 public:
  explicit Contender(const Work& work)
      : batch_(work.batch), ddp_(comm_, [&] { return work.make(); }) {
    ddp_.optimizer().lr = 1e-4;
    for (int i = 0; i < 5; ++i) ddp_.step(batch_);
    comm_.synchronize();
  }
  void measure(int steps) {
    for (int i = 0; i < 3; ++i) ddp_.step(batch_);
    comm_.synchronize();
    const auto start = Clock::now();
    begin_.record(comm_.gpu().stream());
    for (int i = 0; i < steps; ++i) ddp_.step(batch_);
    end_.record(comm_.gpu().stream());
    comm_.synchronize();
    wall_.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count() /
                    steps);
    device_.push_back(end_.microseconds_since(begin_) / steps);
  }
  StepTimes times() const { return {summary(wall_), summary(device_)}; }

 private:
  CudaLoopbackCommunicator comm_{std::make_shared<Gpu>(Rank{0}, 0)};
  TensorBatch batch_;
  DistributedDataParallel<Task, Device<Cuda>, World<1>, Optimizer<AdamW>, Policies...> ddp_;
  Mark begin_, end_;
  std::vector<double> wall_, device_;
};

std::vector<Comparison> compare(const std::string& what, const std::string& part, const Work& work,
                                double eager_target, double graph_target, double compiled_target) {
  Contender<> by_calls(work);
  Contender<CapturedStep> captured(work);
  const auto rounds = [&] {
    for (int i = 0; i != work.rounds; ++i) {
      by_calls.measure(work.steps / 4);
      captured.measure(work.steps);
    }
  };
  rounds();
  auto torch = torch_ways("torch/gpu.py " + part, "step");
  rounds();
  const StepTimes eager = by_calls.times();
  const StepTimes graph = captured.times();
  return {
      {what + ": captured against Python DDP eager", graph.wall, torch["eager"].wall, eager_target},
      {what + ": captured against Python DDP in a CUDA graph", graph.wall, torch["graph"].wall,
       graph_target},
      {what + ": captured against Python DDP, torch.compile", graph.wall, torch["compile"].wall,
       compiled_target},
      {what + ": captured against Python DDP, torch.compile with the loss", graph.wall,
       torch["compile_loss"].wall, 0},
      {what + ": captured against Python without DDP, eager", graph.wall, torch["plain"].wall, 0},
      {what + ": captured, device time against Python's in a graph", graph.device,
       torch["graph"].device, 0},
      {what + ": call by call against Python DDP eager", eager.wall, torch["eager"].wall, 0},
  };
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) try {
  const auto wants = [&](std::string_view part) { return argc < 2 || part == argv[1]; };
  if (lockstep::detail::visible_gpus() == 0) {
    std::fprintf(stderr, "bench torch: there is no GPU here\n");
    return 1;
  }
  lockstep::check_cuda(cudaSetDevice(0), "cudaSetDevice");
  if (wants("mlp")) {
    bench::print_table(
        bench::compare("MLP 784-256-256-10, batch 64, AdamW", "mlp", bench::mlp(), 15, 1.5, 0),
        "torch_gpu_mlp");
  }
  if (wants("gpt2")) {
    bench::print_table(bench::compare("GPT-2 124M, batch 16 x 1024, bf16 autocast, AdamW", "gpt2",
                                      bench::transformer(), 1, 0, 1),
                       "torch_gpu_gpt2");
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench torch: %s\n", error.what());
  return 1;
}
