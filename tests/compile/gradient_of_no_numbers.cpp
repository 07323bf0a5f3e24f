// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: set_grad takes a number for a scalar parameter
#include "lockstep/detail/bucket/step.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"slope", float>>;
};

#ifdef REJECT
void use(const detail::BareStep<Net>& step) { step.set_grad("slope"_p, "1"); }
#else
void use(const detail::BareStep<Net>& step) { step.set_grad("slope"_p, 1); }
#endif
