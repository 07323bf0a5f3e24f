// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model declares no outputs to predict
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Learner {
  using Parameters = ParameterList<Parameter<"w", float, 3>>;
#ifndef REJECT
  using Output = OutputOf<float, 10>;
  void predict(auto&, const auto&, auto) {}
#endif
  float forward(auto&, const auto&) { return 0; }
  void backward(auto&, const auto&) {}
};

void use(Trainer<Learner>& job, const InMemoryDataset<float, int>& data) {
  static_cast<void>(job.predict(data, 4));
}
