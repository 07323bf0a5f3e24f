// SPDX-License-Identifier: Apache-2.0
// Fashion-MNIST on a GPU: `./x train --gpu` runs this program. It is example 03 with another model,
// another device, and the whole step captured into a CUDA graph.
//
//   ./fashion_mnist_gpu --log run.jsonl              (a number of epochs may follow)
//   ./fashion_mnist_gpu --ranks 4                    (they share the GPUs of this host)
//   ./fashion_mnist_gpu --strategy dp --replicas 4   (one process cuts every batch into four)
#include <string>

#include "mlp.cuh"
#include "strategy.hpp"

template <class Strategy>
using Job =
    Trainer<GpuMlp<float, 784, 512, 10>, ParallelStrategy<Strategy>, Device<Cuda>, Backend<Shm>,
            CapturedStep, Sampler<Distributed, Padding>, Optimizer<AdamW>, Schedule<Cosine>>;

template <class Strategy>
int train(int argc, char** argv) {
  return launch<Job<Strategy>>(argc, argv, [](auto& job) {
    const auto train = fashion_mnist("train", job.data());
    const auto test = fashion_mnist("test", job.data());
    const std::size_t batch_size = 128 / job.world_size().value();  // of all ranks together: 128
    const auto& arguments = job.arguments();
    job.optimizer().lr = 2e-3;
    Scores scores;
    for (auto epoch : job.epochs(arguments.size() > 1 ? std::stoul(arguments[1]) : 8)) {
      for (const auto& batch : epoch.batches(train, batch_size)) job.step(batch);
      scores = job.evaluate(test, 500);
    }
    job.on_rank0([&](auto log) {
      log.print("test accuracy " + fixed_text(100 * scores["accuracy"], 2) + "%");
    });
  });
}

int main(int argc, char** argv) {
  return wants_dp(argc, argv) ? train<DP>(argc, argv) : train<DDP>(argc, argv);
}
