// SPDX-License-Identifier: Apache-2.0
// A convolutional network on GPUs, with convolutions by cuDNN: example 06 with another model and
// device, and the whole step, batch norm's exchange among ranks included, captured into a CUDA
// graph.
//
//   ./convnet_gpu --ranks 8 --epochs 4
//   ./convnet_gpu --ranks 8 --backend shm   (ranks are threads instead of processes)
//
// A rank has a GPU of its own; LOCKSTEP_SHARE_GPUS=1 lets ranks share those that there are.
#include <string>

#include "convnet.cuh"
#include "cudnn_layers.cuh"
#include "fashion_mnist.hpp"
#include "lockstep/nccl.cuh"
#include "strategy.hpp"

template <class Transport>
using Job = Trainer<GpuConvNet<float, CudnnLayers, 1, 28, 32, 64, 10>, Device<Cuda>,
                    Backend<Transport>, CapturedStep, Norms<Synced>, Sampler<Distributed, Padding>,
                    Optimizer<AdamW>, Schedule<Cosine>>;

template <class Transport>
int train(int argc, char** argv) {
  return launch<Job<Transport>>(argc, argv, [](auto& job) {
    const auto epochs = job.option("epochs", 8u, "passes over the training images");
    ask_backend(job);
    const auto train = fashion_mnist("train", job.data());
    const auto test = fashion_mnist("test", job.data());
    const std::size_t batch_size = 128 / job.world_size().value();  // of all ranks together: 128
    job.optimizer().lr = 2e-3;
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
  return wants_shm(argc, argv) ? train<Shm>(argc, argv) : train<Nccl>(argc, argv);
}
