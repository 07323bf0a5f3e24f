// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the phases of a step come in the order
#include "lockstep/trainer/ddp.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3>>;
  double forward(auto&, int) { return 0; }
  void backward(auto& step, int) { step.ready("w"_p); }
};

using Ddp = DistributedDataParallel<Net>;

double train(Ddp& ddp, const int& batch) {
#ifdef REJECT
  auto forwarded = ddp.forward(batch);
  forwarded.backward();
  forwarded.backward();
  return 0;
#else
  auto forwarded = ddp.forward(batch);
  return std::move(forwarded).backward().reduce_and_update();
#endif
}
