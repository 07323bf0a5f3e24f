// SPDX-License-Identifier: Apache-2.0
// The same network in a loop of one's own, without `launch`: whoever starts the processes says
// which ranks they are. mpirun -n 2 ./by_hand
#include "convolution.hpp"

#include <cstdio>

using namespace lockstep;

int main() {
  auto group = init_process_group();
  const std::size_t world = group.world_size().value();
  const auto train = make_images(480, 1);
  const auto test = make_images(101, 2);
  DistributedSampler<> sampler(train.size(), group.world_size(), group.rank());
  DataLoader loader(train, sampler, {.batch_size = 24 / world});
  DistributedSampler<Exact, InOrder> shares(test.size(), group.world_size(), group.rank());
  DataLoader test_loader(test, shares, {.batch_size = 20});
  DistributedDataParallel<ConvNet, Optimizer<AdamW>> ddp(*group);
  ddp.optimizer().lr = 0.02;

  double totals[3] = {};  // loss, right answers, samples
  for (std::uint64_t epoch = 0; epoch < 12; ++epoch) {
    sampler.set_epoch(Epoch{epoch});
    for (const auto& batch : loader) ddp.forward(batch).backward().reduce().update();

    Tally tally;
    for (const auto& batch : test_loader) ddp.evaluate(batch, tally);
    totals[2] = tally.scores().count("loss");
    totals[0] = tally.mean("loss") * totals[2];
    totals[1] = tally.mean("accuracy") * totals[2];
    group->all_reduce(totals, Sum{});
  }
  if (group.rank() == Rank{0})
    std::printf("loss %.6f, accuracy %.4f\n", totals[0] / totals[2], totals[1] / totals[2]);
  group->barrier();
  return totals[1] / totals[2] > 0.95 ? 0 : 1;
}
