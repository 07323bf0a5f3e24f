// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with Sharding<FullyShard> no rank has a whole parameter to look at
#include "lockstep/detail/comm/loopback.hpp"
#include "phases.hpp"

using namespace lockstep;
using phases::Net;

void look(Replica<Net, CanonicalPolicies<Backend<Gloo>, Sharding<FullyShard>>,
                  LoopbackCommunicator>& replica) {
#ifdef REJECT
  static_cast<void>(replica.param("w"_p));
#else
  replica.for_each_parameter([](auto, auto) {});
#endif
}
