// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model has no forward(step, batch) for this batch
#include "job.hpp"

using namespace lockstep;

#ifdef REJECT
struct Learner {
  using Parameters = job::Line::Parameters;
  void backward(auto& step, const auto&) { step.ready("slope"_p); }
};
using Job = Trainer<Learner, World<2>>;
#else
using Job = job::Job;
#endif

int run(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {
    const job::Points points({1, 2}, {3, 6});
    for (auto epoch : job.epochs(4)) {
      for (const auto& batch : epoch.batches(points, 1)) job.step(batch);
      job.evaluate(points, 1);
    }
  });
}
