// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: backward of a norm belongs to a training step
#include "lockstep/detail/norm/layer_norm.hpp"

using namespace lockstep;

struct Net {
  using Norm = LayerNorm<"ln1", 8>;
  using Parameters = ParameterList<Norm>;
  Norm norm;
};

#ifdef REJECT
using Step = detail::EvaluationStep<detail::BareStep<Net>>;
#else
using Step = detail::BareStep<Net>;
#endif
using Values = HostView<float, 4, 8>;

void use(Net& net, Step& step, Values x, Values dy) { net.norm.backward(step, x, dy, dy); }
