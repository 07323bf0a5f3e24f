// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a sub-graph contains no parameter to train
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Frozen<"b">, UnusedParameters<Subgraphs<Subgraph<"bias", "b">>>>;
#else
using Job = Trainer<Net, Frozen<"b">, UnusedParameters<Subgraphs<Subgraph<"bias", "*">>>>;
#endif
