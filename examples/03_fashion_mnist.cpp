// SPDX-License-Identifier: Apache-2.0
// Fashion-MNIST on the ranks of one host: `./x train` runs this program. The whole job is a type;
// the loop sets the sampler's epoch, shows its progress, and counts every test image once.
//
//   ./fashion_mnist --ranks 2 --epochs 4 --log run.jsonl       (--help names all options)
//   mpirun -n 4 ./fashion_mnist
//   ./fashion_mnist --strategy dp --replicas 2                 (one process cuts every batch in
//   two)
#include <string>

#include "fashion_mnist.hpp"
#include "mlp.hpp"
#include "strategy.hpp"

template <class Strategy>
using Job = Trainer<Mlp<float, 784, 256, 10>, ParallelStrategy<Strategy>, Backend<Shm>,
                    Sampler<Distributed, Padding>, Optimizer<AdamW>, Schedule<Cosine>>;

template <class Strategy>
int train(int argc, char** argv) {
  return launch<Job<Strategy>>(argc, argv, [](auto& job) {
    const auto epochs = job.option("epochs", 8u, "passes over the training images");
    job.optimizer().lr = job.option("lr", 2e-3, "learning rate");
    ask_strategy(job);
    const auto train = fashion_mnist("train", job.data());
    const auto test = fashion_mnist("test", job.data());
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
  return wants_dp(argc, argv) ? train<DP>(argc, argv) : train<DDP>(argc, argv);
}
