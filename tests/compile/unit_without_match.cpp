// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: no scope or parameter is matched by a pattern of Units
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Block = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
  using Parameters = ParameterList<Repeat<"blocks", 2, Block>>;
};

#ifdef REJECT
using Job = Trainer<Net, Backend<Gloo>, Sharding<FullyShard, Units<"block.*">>>;
#else
using Job = detail::Composed<Net, Backend<Gloo>, Sharding<FullyShard, Units<"blocks.*">>>;
#endif
