// SPDX-License-Identifier: Apache-2.0
// A convolutional network on Fashion-MNIST whose batch norms take their statistics over the samples
// of all ranks: `Norms<Synced>`. The model does not know of it; without that line every rank has
// statistics of its own.
//
//   ./convnet --ranks 2 --epochs 4 --log run.jsonl
//   torchrun --no-python --nproc-per-node 4 ./convnet
#include <string>

#include "convnet.hpp"
#include "fashion_mnist.hpp"

using Job =
    Trainer<ConvNet<float, 1, 28, 32, 64, 10>, Norms<Synced>, Optimizer<AdamW>, Schedule<Cosine>>;

int main(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {
    const auto epochs = job.option("epochs", 8u, "passes over the training images");
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
