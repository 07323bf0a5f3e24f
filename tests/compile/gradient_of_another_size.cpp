// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: set_grad was given another number of elements than the parameter has
#include <array>

#include "lockstep/detail/bucket/step.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
void use(const detail::BareStep<Net>& step) { step.set_grad("b"_p, 1.f); }
#else
void use(const detail::BareStep<Net>& step) { step.set_grad("b"_p, std::array{1.f, 2.f, 3.f}); }
#endif
