// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: std::vector<bool> packs its elements into bits
#include <array>
#include <vector>

#include "lockstep/detail/comm/loopback.hpp"

using namespace lockstep;

inline void any_rank(LoopbackCommunicator& comm) {
#ifdef REJECT
  std::vector<bool> done(4);
#else
  std::array<bool, 4> done{};
#endif
  comm.all_reduce(done, Max{});
}
