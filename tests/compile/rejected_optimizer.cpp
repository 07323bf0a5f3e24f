// SPDX-License-Identifier: Apache-2.0
// The optimizer itself is rejected, and its numbers are set all the same.
// expect: lockstep: a policy was given something that is not one of its choices
#include "job.hpp"

using namespace lockstep;

#ifdef REJECT
using Job = Trainer<job::Line, Optimizer<Shm>, World<2>>;
#else
using Job = job::Job;
#endif

int run(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {
    const job::Points points({1, 2, 3, 4}, {3, 6, 9, 12});
    job.optimizer().lr = 0.05;
    for (auto epoch : job.epochs(4))
      for (const auto& batch : epoch.batches(points, 1)) job.step(batch);
    job.on_rank0([&](auto log) { log.print("y = " + value_text(job.param("slope"_p)()) + " x"); });
  });
}
