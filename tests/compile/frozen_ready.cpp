// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: this parameter is frozen and has no gradient
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

using Step = detail::Composed<Net, Frozen<"b">>::bare_step;

#ifdef REJECT
void use(const Step& step) { step.ready("b"_p); }
#else
void use(const Step& step) {
  if constexpr (trains<decltype(step)>("b"_p)) step.ready("b"_p);
}
#endif
