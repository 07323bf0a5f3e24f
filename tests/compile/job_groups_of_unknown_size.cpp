// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: Groups takes a world and its groups
#include "lockstep/detail/topology/grid.hpp"
#include "lockstep/detail/topology/groups.hpp"

using namespace lockstep;

#ifdef REJECT
using Divided = Groups<Grid<8, dynamic>>;
#else
using Divided = Groups<Grid<dynamic, 4>>;
#endif
static_assert(sizeof(Divided) != 0);
