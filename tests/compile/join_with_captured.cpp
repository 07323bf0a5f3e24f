// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with UnevenInputs<Join> exhausted ranks run other work
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Device<Cuda>, CapturedStep, UnevenInputs<Join>>;
#else
using Job = detail::Composed<Net, Device<Cuda>, UnevenInputs<Join>>;
#endif
