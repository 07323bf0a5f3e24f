// SPDX-License-Identifier: Apache-2.0
// Gradient hooks: example 03's training, and from the hundredth step on every weight's gradient
// travels as two matrices of two columns, a fiftieth of the bytes. What that loses is added to the
// next step's gradient, so that the accuracy stays.
//
//   ./hooks --ranks 2 --epochs 8
//
// Between the ranks of one host bytes cost little. Over a network they are most of a step: there,
// Backend<Gloo> or Backend<Nccl> (docs/hooks.md, and ./x bench hooks).
#include <string>

#include "fashion_mnist.hpp"
#include "mlp.hpp"

using Job = Trainer<Mlp<float, 784, 256, 10>, Hooks<PowerSGD<2, PowerSgdOptions{.start = 100}>>,
                    Optimizer<AdamW>, Schedule<Cosine>>;

int main(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {
    const auto epochs = job.option("epochs", 4u, "passes over the training images");
    const auto train = fashion_mnist("train", job.data());
    const auto test = fashion_mnist("test", job.data());
    job.optimizer().lr = 2e-3;
    job.fit(train, test, {.epochs = epochs, .batch_size = 128 / job.world_size().value()});
    const Scores scores = job.evaluate(test, 500);
    job.on_rank0([&](auto log) {
      log.print("test accuracy " + fixed_text(100 * scores["accuracy"], 2) + "%");
    });
  });
}
