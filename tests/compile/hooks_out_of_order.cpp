// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: these hooks cannot follow each other
#include "lockstep/detail/hook/compress_to.hpp"
#include "lockstep/detail/hook/local_sgd.hpp"
#include "lockstep/detail/hook/power_sgd.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Hooks<PowerSGD<1>, LocalSGD<2>>>;
#else
using Job = detail::Composed<Net, Hooks<PowerSGD<1>, CompressTo<Half>>>;
#endif
