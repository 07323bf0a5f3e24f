// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a rank is in no group; the groups must cover the world
#include "lockstep/detail/topology/groups.hpp"

using namespace lockstep;

#ifdef REJECT
static_assert(sizeof(Groups<World<4>, Group<0, 1>, Group<3>>) > 0);
#else
static_assert(sizeof(Groups<World<4>, Group<0, 1>, Group<2, 3>>) > 0);
#endif
