// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with Norms<Synced> ranks must run the same norms in every step
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Norms<Synced>, UnusedParameters<Subgraphs<Subgraph<"one", "w">>>>;
#else
using Job =
    Trainer<Net, Norms<Synced>, UnusedParameters<Subgraphs<SameOnAllRanks, Subgraph<"one", "w">>>>;
#endif
