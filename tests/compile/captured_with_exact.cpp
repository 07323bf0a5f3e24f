// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with Sampler<Distributed, Exact> ranks can have last batches of different sizes
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Device<Cuda>, CapturedStep, Sampler<Distributed, Exact>>;
#else
using Job = detail::Composed<Net, Device<Cuda>, CapturedStep, Sampler<Distributed, Masked>>;
#endif
