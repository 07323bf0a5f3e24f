// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the key of a declared tensor is its name with _p behind it
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
float use(const detail::BareStep<Net>& step) {
  step.grad("w")(1, 1) = 2 * step.param("w")(1, 1);
  step.ready("w");
  return step.param("b")(1);
}
#else
float use(const detail::BareStep<Net>& step) {
  step.grad("w"_p)(1, 1) = 2 * step.param("w"_p)(1, 1);
  step.ready("w"_p);
  return step.param("b"_p)(1);
}
#endif
