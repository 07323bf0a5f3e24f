// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: bool is reduced with Max or BitOr (any rank), Min or BitAnd (all ranks)
#include "lockstep/detail/comm/loopback.hpp"

using namespace lockstep;

inline bool any_rank(LoopbackCommunicator& comm, bool done) {
#ifdef REJECT
  return comm.all_reduce(done, Sum{});
#else
  return comm.all_reduce(done, Max{});
#endif
}
