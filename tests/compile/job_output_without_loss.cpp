// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model declares an Output and takes no loss of it
// compilers: g++
#include "job.hpp"

using namespace lockstep;

struct Learner {
  using Parameters = job::Line::Parameters;
  using Output = OutputOf<float, 1>;
  float forward(auto&, const auto&) { return 0; }
  void predict(auto&, const auto&, auto) {}
#ifndef REJECT
  float loss(auto&, const auto&, auto, auto) { return 0; }
#endif
  void backward(auto& step, const auto&, auto...) { step.ready("slope"_p); }
};

using Job = Trainer<Learner, ParallelStrategy<DP>, World<2>>;

int run(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {
    const job::Points points({1, 2}, {3, 6});
    for (auto epoch : job.epochs(4))
      for (const auto& batch : epoch.batches(points, 1)) job.step(batch);
  });
}
