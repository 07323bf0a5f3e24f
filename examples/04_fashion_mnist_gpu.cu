// SPDX-License-Identifier: Apache-2.0
// Fashion-MNIST on GPUs: `./x train --gpu` runs this program. It is example 03 with another model,
// another device, the data in the GPU's memory, and the whole step captured into a CUDA graph.
//
//   ./fashion_mnist_gpu --ranks 8 --epochs 4         (--help names all options)
//   ./fashion_mnist_gpu --ranks 8 --backend shm      (ranks are threads instead of processes)
//   ./fashion_mnist_gpu --strategy dp --replicas 8   (one process cuts every batch into eight)
//
// A rank has a GPU of its own; LOCKSTEP_SHARE_GPUS=1 lets ranks share those that there are.
#include <string>

#include "fashion_mnist.hpp"
#include "lockstep/nccl.cuh"
#include "mlp.cuh"
#include "strategy.hpp"

template <class Strategy, class Transport>
using Job = Trainer<GpuMlp<float, 784, 512, 10>, ParallelStrategy<Strategy>, Device<Cuda>,
                    Backend<Transport>, CapturedStep, Sampler<Distributed, Padding>,
                    Optimizer<AdamW>, Schedule<Cosine>>;

template <class Strategy, class Transport>
int train(int argc, char** argv) {
  return launch<Job<Strategy, Transport>>(argc, argv, [](auto& job) {
    const auto epochs = job.option("epochs", 8u, "passes over the training images");
    job.optimizer().lr = job.option("lr", 2e-3, "learning rate");
    ask_strategy(job);
    ask_backend(job);
    const DeviceResident train(fashion_mnist("train", job.data()));
    const DeviceResident test(fashion_mnist("test", job.data()));
    const std::size_t batch_size = 128 / job.world_size().value();  // of all ranks together: 128
    Scores scores;
    for (auto epoch : job.epochs(epochs)) {
      for (const auto& batch : epoch.batches(train, batch_size)) job.step(batch);
      scores = job.evaluate(test, 500);
    }
    job.on_rank0([&](auto log) {
      log.print("test accuracy " + fixed_text(100 * scores["accuracy"], 2) + "%");
    });
  });
}

int main(int argc, char** argv) {
  if (wants_dp(argc, argv)) return train<DP, Shm>(argc, argv);
  return wants_shm(argc, argv) ? train<DDP, Shm>(argc, argv) : train<DDP, Nccl>(argc, argv);
}
