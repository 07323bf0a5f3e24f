// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: Precision<Mixed<...>> needs a GPU's arithmetic
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Precision<Mixed<BFloat16>>>;
#else
using Job = detail::Composed<Net, Device<Cuda>, Precision<Mixed<BFloat16>>>;
#endif
