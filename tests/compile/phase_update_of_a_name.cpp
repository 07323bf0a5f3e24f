// SPDX-License-Identifier: Apache-2.0
// One message for all: two programs show it to nvcc, this one to g++ alone.
// expect: lockstep: the phases of a step come in the order
// compilers: g++
#include "phases.hpp"

using namespace lockstep;
using phases::Ddp;

double train(Ddp& ddp, const int& batch) {
#ifdef REJECT
  auto averaged = ddp.forward(batch).backward().reduce();
  averaged.update();
  return 0;
#else
  auto averaged = ddp.forward(batch).backward().reduce();
  return averaged.grad("w"_p)(0) > 0 ? std::move(averaged).update() : 0;
#endif
}
