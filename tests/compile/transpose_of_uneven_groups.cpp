// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: only a topology whose groups all have the same size can be transposed
#include "lockstep/detail/topology/grid.hpp"
#include "lockstep/detail/topology/groups.hpp"

using namespace lockstep;

#ifdef REJECT
static_assert(sizeof(Transposed<Groups<World<3>, Group<0, 1>, Group<2>>>) > 0);
#else
static_assert(sizeof(Transposed<Grid<4, 2>>) > 0);
#endif
