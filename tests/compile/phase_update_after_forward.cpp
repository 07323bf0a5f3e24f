// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the phases of a step come in the order
#include "phases.hpp"

using phases::Ddp;

double train(Ddp& ddp, const int& batch) {
#ifdef REJECT
  ddp.forward(batch).update();
  return 0;
#else
  return ddp.forward(batch).backward().reduce().update();
#endif
}
