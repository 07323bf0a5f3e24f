// SPDX-License-Identifier: Apache-2.0
// One message for all: two programs show it to nvcc, this one to g++ alone.
// expect: lockstep: the phases of a step come in the order
// compilers: g++
#include "phases.hpp"

using phases::Ddp;

double train(Ddp& ddp, const int& batch) {
#ifdef REJECT
  auto backwarded = ddp.forward(batch).backward();
  auto averaged = std::move(backwarded).reduce();
  averaged.reduce();
  return 0;
#else
  auto backwarded = ddp.forward(batch).backward();
  auto averaged = std::move(backwarded).reduce();
  return std::move(averaged).update();
#endif
}
