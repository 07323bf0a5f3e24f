// SPDX-License-Identifier: Apache-2.0
// One message for all: two programs show it to nvcc, this one to g++ alone.
// expect: lockstep: the phases of a step come in the order
// compilers: g++
#include "phases.hpp"

using phases::Ddp;

double train(Ddp& ddp, const int& batch) {
#ifdef REJECT
  ddp.forward(batch).backward().update();
  return 0;
#else
  return ddp.forward(batch).backward().reduce_and_update();
#endif
}
