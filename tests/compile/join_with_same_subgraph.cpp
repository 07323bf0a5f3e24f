// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with UnevenInputs<Join> an exhausted rank does not know which sub-graph
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

template <class Sets>
using Uneven = Trainer<Net, UnevenInputs<Join>, UnusedParameters<Sets>>;

#ifdef REJECT
using Job = Uneven<Subgraphs<SameOnAllRanks, Subgraph<"one", "w">>>;
#else
using Job = Uneven<Subgraphs<Subgraph<"one", "w">>>;
#endif
