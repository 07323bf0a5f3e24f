// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: Subgraphs<...> declares no sub-graph
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, UnusedParameters<Subgraphs<SameOnAllRanks>>>;
#else
using Job = Trainer<Net, UnusedParameters<Subgraphs<SameOnAllRanks, Subgraph<"all", "*">>>>;
#endif
