// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: Precision<Mixed<Parameters, Reduction, Buffers>> takes float, Half and BFloat16
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Device<Cuda>, Precision<Mixed<int>>>;
#else
using Job = detail::Composed<Net, Device<Cuda>, Precision<Mixed<Half, float>>>;
#endif
