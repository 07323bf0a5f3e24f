// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with UnusedParameters<Zero> the host decides in every step
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Device<Cuda>, CapturedStep, UnusedParameters<Zero>>;
#else
using Job = detail::Composed<Net, Device<Cuda>, CapturedStep, UnusedParameters<Forbid>>;
#endif
