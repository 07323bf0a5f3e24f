// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: this choice has its name but is not built yet
#include "lockstep/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

struct Someday : PlannedChoice<axes::Buffers> {
  static constexpr std::string_view name = "Someday";
};

#ifdef REJECT
using Job = Trainer<Net, Buffers<Someday>>;
#else
using Job = Trainer<Net, Sharding<Replicated>>;
#endif
