// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: this model's forward keeps no outputs
#include "lockstep/detail/data/batch.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"

using namespace lockstep;
using Batch = LabelledBatch<float, int>;

struct Learner {
  using Parameters = ParameterList<Parameter<"w", float, 3>>;
  using Output = OutputOf<float, 10>;
  void predict(auto&, const Batch&, auto) {}
#ifndef REJECT
  float loss(auto&, const Batch&, auto, auto) { return 0; }
  void backward(auto&, const Batch&, auto) {}
#endif
  float forward(auto&, const Batch&) { return 0; }
  void backward(auto&, const Batch&) {}
};

void use(DistributedDataParallel<Learner>& ddp, const Batch& batch) {
  static_cast<void>(ddp.forward(batch).outputs());
}
