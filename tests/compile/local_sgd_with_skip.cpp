// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with LocalSGD every rank has gradients of its own
#include "lockstep/detail/hook/local_sgd.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Hooks<LocalSGD<8>>, Anomaly<Skip>>;
#else
using Job = detail::Composed<Net, Hooks<LocalSGD<8>>, Anomaly<Stop>>;
#endif
