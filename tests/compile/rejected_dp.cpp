// SPDX-License-Identifier: Apache-2.0
// Replicas of one process, by hand.
// expect: lockstep: a policy was given twice; keep one of the two
#include "job.hpp"

using namespace lockstep;

#ifdef REJECT
using Job = DataParallel<job::Line, World<2>, World<3>>;
#else
using Job = DataParallel<job::Line, World<2>>;
#endif

double train(const job::Points& points) {
  DistributedSampler<> sampler(points.size(), WorldSize{1}, Rank{0});
  DataLoader loader(points, sampler, {.batch_size = 2});
  Job dp({.replicas = 2});
  dp.optimizer().lr = 2e-3;
  double sum = 0;
  for (const auto& batch : loader) sum += dp.step(batch);
  return sum;
}
