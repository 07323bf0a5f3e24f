// SPDX-License-Identifier: Apache-2.0
// ZeRO: AdamW's two states of every parameter exist once over all ranks. Every rank updates the
// slice whose states it keeps, and training comes to what it comes to without.
//
//   ./zero --ranks 4          each rank keeps a quarter of the states
//
// The same line works between hosts (Backend<Gloo>) and on GPUs: docs/sharding.md.
#include <string>

#include "image_dataset.hpp"
#include "mlp.hpp"

using Job = Trainer<Mlp<float, 784, 64, 10>, Optimizer<AdamW>, Sharding<ZeroRedundancy>>;

int main(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {
    const Normalization normalization{.mean = 0.5f, .deviation = 0.3f};
    const auto train =
        generated_dataset("train", {.samples = 1000, .normalization = normalization});
    job.optimizer().lr = 3e-3;
    job.fit(train, {.epochs = 4, .batch_size = 16});

    std::uint64_t kept = 0;  // numbers, by this rank
    job.for_each_state([&](auto, auto, const auto& values) { kept += values.size(); });
    const std::uint64_t most = job.all_reduce(kept, Max{});
    const std::uint64_t all = job.all_reduce(kept, Sum{});
    job.on_rank0([&](auto log) {
      log.print("of " + std::to_string(all) + " numbers of state no rank keeps more than " +
                std::to_string(most));
    });
  });
}
