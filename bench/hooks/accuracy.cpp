// SPDX-License-Identifier: Apache-2.0
#include "accuracy.hpp"

#include <cstdio>

#include "fashion_mnist.hpp"
#include "mlp.hpp"

namespace {

template <class... Policies>
int train(const std::string& name, int argc, char** argv) {
  using Job = Trainer<Mlp<float, 784, 256, 10>, Backend<Shm>, Sharding<Replicated>,
                      Optimizer<AdamW>, Schedule<Cosine>, Policies...>;
  return launch<Job>(argc, argv, [&](Job& job) {
    job.arguments();  // `main` has read them
    const auto train = fashion_mnist("train", job.data());
    const auto test = fashion_mnist("test", job.data());
    job.optimizer().lr = 2e-3;
    Scores scores;
    for (auto epoch : job.epochs(4)) {
      for (const auto& batch : epoch.batches(train, 128 / job.world_size().value()))
        job.step(batch);
      scores = job.evaluate(test, 500);
    }
    job.on_rank0([&](auto log) {
      log.print("accuracy " + name + ": " + fixed_text(100 * scores["accuracy"], 2));
    });
  });
}

}  // namespace

int accuracy(const std::string& hook, int argc, char** argv) {
  // Of 1876 steps the first thousand travel whole, as PyTorch has it; or the first hundred.
  constexpr PowerSgdOptions early{.start = 100};
  if (hook == "none") return train<>(hook, argc, argv);
  if (hook == "PowerSGD-1") return train<Hooks<PowerSGD<1>>>(hook, argc, argv);
  if (hook == "PowerSGD-2") return train<Hooks<PowerSGD<2>>>(hook, argc, argv);
  if (hook == "PowerSGD-1-early") return train<Hooks<PowerSGD<1, early>>>(hook, argc, argv);
  if (hook == "PowerSGD-2-early") return train<Hooks<PowerSGD<2, early>>>(hook, argc, argv);
  std::fprintf(stderr, "bench hooks: there is no hook %s\n", hook.c_str());
  return 1;
}
