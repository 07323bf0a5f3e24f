// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: Sharding<HostShared> needs ranks that share memory
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Backend<Gloo>, Sharding<HostShared>>;
#else
using Job = detail::Composed<Net, Backend<Gloo>, Sharding<Replicated>>;
#endif
