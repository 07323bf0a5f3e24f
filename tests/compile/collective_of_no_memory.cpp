// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a collective takes memory of numbers or bools (a span, vector, array or view)
#include <array>
#include <vector>

#include "lockstep/detail/comm/loopback.hpp"

using namespace lockstep;

struct Point {
  float x, y;
};

inline void gather(LoopbackCommunicator& comm, const Point& point) {
  std::vector<float> all(2);
#ifdef REJECT
  comm.all_gather(point, all);
#else
  comm.all_gather(std::array{point.x, point.y}, all);
#endif
}
