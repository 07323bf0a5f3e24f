// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a view takes one index for each of its dimensions
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
float use(const detail::BareStep<Net>& step) { return step.param("w"_p)(1); }
#else
float use(const detail::BareStep<Net>& step) { return step.param("w"_p)(1, 1); }
#endif
