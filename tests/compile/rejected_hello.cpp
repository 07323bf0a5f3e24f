// SPDX-License-Identifier: Apache-2.0
// README's program.
// expect: lockstep: a policy was given twice; keep one of the two
#include "job.hpp"

using namespace lockstep;

#ifdef REJECT
using Job = Trainer<job::Line, Backend<Shm>, World<2>, Backend<Gloo>>;
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
