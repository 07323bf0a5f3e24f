// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the part does not divide the group size
#include "lockstep/topology/groups.hpp"
#include "lockstep/topology/topology.hpp"

using namespace lockstep;

#ifdef REJECT
static_assert(sizeof(Split<Grid<8, 4>, 3>) > 0);
#else
static_assert(sizeof(Split<Grid<8, 4>, 2>) > 0);
#endif
