// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a grid needs a world of at least one rank
#include "lockstep/detail/topology/grid.hpp"

using namespace lockstep;

#ifdef REJECT
static_assert(sizeof(Grid<0, 1>) > 0);
#else
static_assert(sizeof(Grid<1, 1>) > 0);
#endif
