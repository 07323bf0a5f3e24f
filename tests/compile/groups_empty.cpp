// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a group is empty; every group needs a rank
#include "lockstep/detail/topology/groups.hpp"

using namespace lockstep;

#ifdef REJECT
static_assert(sizeof(Groups<World<2>, Group<0, 1>, Group<>>) > 0);
#else
static_assert(sizeof(Groups<World<2>, Group<0>, Group<1>>) > 0);
#endif
