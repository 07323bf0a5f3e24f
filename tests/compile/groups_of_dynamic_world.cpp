// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: groups listed as types need a world of known size
#include "lockstep/detail/topology/groups.hpp"

using namespace lockstep;

#ifdef REJECT
static_assert(sizeof(Groups<World<dynamic>, Group<0, 1>>) > 0);
#else
static_assert(sizeof(Groups<World<2>, Group<0, 1>>) > 0);
#endif
