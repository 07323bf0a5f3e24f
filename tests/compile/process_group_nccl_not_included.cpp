// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a job with Device<Cuda> and Backend<Nccl>, its default, also between
#include "lockstep/detail/trainer/process_group.hpp"

using namespace lockstep;

inline bool meet(Session& session) {
#ifdef REJECT
  ProcessGroup<Backend<Nccl>> group(session);
#else
  ProcessGroup group(session);
#endif
  group->barrier();
  return is_initialized();
}
