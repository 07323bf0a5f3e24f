// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the phases of a step come in the order
#include "phases.hpp"

using phases::Ddp;

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
