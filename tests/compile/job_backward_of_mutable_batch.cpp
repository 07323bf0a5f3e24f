// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model has no backward(step, batch) for this batch
#include "job.hpp"

using namespace lockstep;

#ifdef REJECT
struct Learner {
  using Parameters = job::Line::Parameters;
  float forward(auto&, const auto&) { return 0; }
  void backward(auto& step, job::Points::batch_type&) { step.ready("slope"_p); }
};
using Job = Trainer<Learner, World<2>>;
#else
using Job = job::Job;
#endif

int run(int argc, char** argv) { return job::run<Job>(argc, argv); }
