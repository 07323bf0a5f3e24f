// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: ranks that capture a step replay it together and must use one sub-graph
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job =
    Trainer<Net, Device<Cuda>, CapturedStep, UnusedParameters<Subgraphs<Subgraph<"one", "w">>>>;
#else
using Job = detail::Composed<Net, Device<Cuda>, CapturedStep,
                             UnusedParameters<Subgraphs<SameOnAllRanks, Subgraph<"one", "w">>>>;
#endif
