// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: fit calls its function after every epoch
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Learner {
  using Parameters = ParameterList<Parameter<"w", float, 3>>;
  float forward(auto&, const auto&) { return 0; }
  void backward(auto&, const auto&) {}
};

void use(Trainer<Learner>& job, const InMemoryDataset<float, int>& data) {
#ifdef REJECT
  job.fit(data, {.epochs = 2}, [](int) {});
#else
  job.fit(data, {.epochs = 2}, [](auto&) {});
#endif
}
