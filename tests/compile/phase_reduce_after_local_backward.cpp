// SPDX-License-Identifier: Apache-2.0
// What backward leaves without synchronisation is a number, the loss, and has no phases.
// expect: which is of non-class type
// compilers: g++
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
  return ddp.no_sync().forward(batch).backward().reduce();
#else
  return ddp.no_sync().forward(batch).backward();
#endif
}
