// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: two sub-graphs have one name, or one has none
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, UnusedParameters<Subgraphs<Subgraph<"one", "w">, Subgraph<"one", "b">>>>;
#else
using Job = Trainer<Net, UnusedParameters<Subgraphs<Subgraph<"one", "w">, Subgraph<"two", "b">>>>;
#endif
