// SPDX-License-Identifier: Apache-2.0
// The loop of example 03, with a function of its own.
// expect: lockstep: CapturedStep makes a CUDA graph
#include "job.hpp"

using namespace lockstep;

#ifdef REJECT
using Job = Trainer<job::Line, CapturedStep, Optimizer<AdamW>>;
#else
using Job = job::Job;
#endif

void train(Job& job, const job::Points& data, const job::Points& test) {
  const auto& arguments = job.arguments();
  job.optimizer().lr = 2e-3;
  Scores scores;
  for (auto epoch : job.epochs(arguments.size() > 1 ? std::stoul(arguments[1]) : 8)) {
    for (const auto& batch : epoch.batches(data, LoaderOptions{.batch_size = 32})) {
      const double loss = job.step(batch);
      if (!(loss < 1e9)) break;
    }
    scores = job.evaluate(test, 500);
    if (scores["loss"] < 0.01) break;
    job.on_rank0([&](auto log) { log.print(epoch); });
  }
}

int run(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {
    const job::Points points({1, 2, 3, 4}, {3, 6, 9, 12});
    train(job, points, points);
    return job.rank() == Rank{0} ? 0 : 1;
  });
}
