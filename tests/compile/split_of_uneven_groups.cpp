// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: only a topology whose groups all have the same size can be split
#include "lockstep/topology/groups.hpp"
#include "lockstep/topology/topology.hpp"

using namespace lockstep;

#ifdef REJECT
static_assert(sizeof(Split<Groups<World<3>, Group<0, 1>, Group<2>>, 1>) > 0);
#else
static_assert(sizeof(Split<World<4>, 2>) > 0);
#endif
