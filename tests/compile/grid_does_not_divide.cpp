// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the group size does not divide the world size
#include "lockstep/detail/topology/grid.hpp"

using namespace lockstep;

#ifdef REJECT
static_assert(sizeof(Grid<6, 4>) > 0);
#else
static_assert(sizeof(Grid<6, 3>) > 0);
#endif
