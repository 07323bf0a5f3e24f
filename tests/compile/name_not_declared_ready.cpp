// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model declares no parameter of this name
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
void use(const detail::BareStep<Net>& step) { step.ready("bais"_p); }
#else
void use(const detail::BareStep<Net>& step) { step.ready("b"_p); }
#endif
