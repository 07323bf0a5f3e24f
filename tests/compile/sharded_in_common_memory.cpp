// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: ranks that share a host's memory keep parameters once already, with Sharding<HostShared>
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Sharding<FullyShard>>;
#else
using Job = detail::Composed<Net, Backend<Gloo>, Sharding<FullyShard>>;
#endif
