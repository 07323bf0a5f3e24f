// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a collective takes memory of numbers or bools (a span, vector, array or view)
#include <vector>

#include "lockstep/detail/comm/loopback.hpp"

using namespace lockstep;

inline void sum(LoopbackCommunicator& comm) {
#ifdef REJECT
  std::vector<long double> losses(4);
#else
  std::vector<double> losses(4);
#endif
  comm.all_reduce(losses, Average{});
}
