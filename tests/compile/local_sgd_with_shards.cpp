// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with LocalSGD every rank updates all parameters by itself
#include "lockstep/detail/hook/local_sgd.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Hooks<LocalSGD<8>>, Sharding<ZeroRedundancy>>;
#else
using Job = detail::Composed<Net, Hooks<LocalSGD<8>>, Sharding<Replicated>>;
#endif
