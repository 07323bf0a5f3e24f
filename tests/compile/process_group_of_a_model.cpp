// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a process group has the policies Backend<...>, Device<...>
#include "lockstep/detail/trainer/process_group.hpp"

using namespace lockstep;

inline void meet() {
#ifdef REJECT
  auto group = init_process_group<Backend<Shm>, Optimizer<AdamW>>();
#else
  auto group = init_process_group<Backend<Shm>, World<2>>();
#endif
  group->barrier();
}
