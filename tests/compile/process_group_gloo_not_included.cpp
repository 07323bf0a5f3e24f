// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a job with Backend<Gloo>, also between hosts only, needs #include
#include "lockstep/detail/trainer/process_group.hpp"

using namespace lockstep;

inline double mean_of(double value) {
#ifdef REJECT
  auto group = init_process_group<Backend<Gloo>>();
#else
  auto group = init_process_group<Backend<Shm>>();
#endif
  return group->all_reduce(value, Average{}) + static_cast<double>(group.rank().value());
}
