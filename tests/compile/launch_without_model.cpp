// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: this model has no default constructor; give launch a model too
#include "lockstep/detail/trainer/launch_job.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Batch {};

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3>>;
  explicit Net(float scale) : scale(scale) {}
  float forward(auto&, const Batch&) { return scale; }
  void backward(auto&, const Batch&) {}
  float scale;
};

using Job = Trainer<Net>;

int start(int argc, char** argv) {
  const auto train = [](Job&) {};
#ifdef REJECT
  return launch<Job>(argc, argv, train);
#else
  return launch<Job>(argc, argv, Net(2), train);
#endif
}
