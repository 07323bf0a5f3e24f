// SPDX-License-Identifier: Apache-2.0
// What backward leaves without synchronisation is a number, the loss, and has no phases.
// expect: which is of non-class type
// compilers: g++
#include "phases.hpp"

using phases::Ddp;

double train(Ddp& ddp, const int& batch) {
#ifdef REJECT
  return ddp.no_sync().forward(batch).backward().reduce();
#else
  return ddp.no_sync().forward(batch).backward();
#endif
}
