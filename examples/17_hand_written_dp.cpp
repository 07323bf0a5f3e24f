// SPDX-License-Identifier: Apache-2.0
// One process, one thread for each replica: `DataParallel` in a loop of one's own. Nothing is
// launched, so this could be a tool or a service that trains now and then.
//
//   ./hand_written_dp                   a replica for each core
//   ./hand_written_dp --replicas 4      four replicas
//
// Every batch is cut into shares. The loss is one over the whole batch, so any number of replicas
// trains the same model.
#include <cstdio>
#include <string>

#include "image_dataset.hpp"
#include "mlp.hpp"

int main(int argc, char** argv) try {
  DpOptions options;
  ProgramOptions command_line(argc, argv);
  const std::size_t replicas = command_line.option("replicas", 0u, "0: one for each core");
  if (command_line.finish()) return 0;  // --help
  if (replicas != 0) options.replicas = replicas;
  DataParallel<Mlp<float, 784, 64, 10>, Optimizer<AdamW>> dp(options);
  dp.optimizer().lr = 1e-3;

  const Normalization normalization{.mean = 0.5f, .deviation = 0.3f};
  const auto train = generated_dataset("train", {.samples = 4000, .normalization = normalization});
  const auto test = generated_dataset("test", {.samples = 1000, .normalization = normalization});
  DistributedSampler<> sampler(train.size(), WorldSize{1}, Rank{0});  // there is one rank: this
  DataLoader loader(train, sampler, {.batch_size = 100});
  DistributedSampler<Exact, InOrder> all(test.size(), WorldSize{1}, Rank{0});
  DataLoader test_loader(test, all, {.batch_size = 500});

  double accuracy = 0;
  for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
    sampler.set_epoch(Epoch{epoch});
    double loss = 0;
    for (const auto& batch : loader) loss = dp.step(batch);

    Tally tally;
    for (const auto& batch : test_loader) dp.evaluate(batch, tally);
    accuracy = tally.scores()["accuracy"];
    std::printf("epoch %d, %zu replicas: loss %.4f, test accuracy %.4f\n",
                static_cast<int>(epoch) + 1, dp.replicas(), loss, accuracy);
  }
  return accuracy > 0.8 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
