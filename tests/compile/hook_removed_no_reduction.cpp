// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the hooks TopK and NoReduction were removed
#include "lockstep/detail/hook/power_sgd.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Hooks<NoReduction>>;
#else
using Job = detail::Composed<Net, Hooks<PowerSGD<2>>>;
#endif
