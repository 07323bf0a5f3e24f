// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a rank is listed twice; groups must not overlap
#include "lockstep/detail/topology/groups.hpp"

using namespace lockstep;

#ifdef REJECT
static_assert(sizeof(Groups<World<4>, Group<0, 1>, Group<1, 2, 3>>) > 0);
#else
static_assert(sizeof(Groups<World<4>, Group<0, 1>, Group<2, 3>>) > 0);
#endif
