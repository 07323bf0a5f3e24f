// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model declares no buffer of this name
#include "lockstep/detail/norm/batch_norm.hpp"

using namespace lockstep;

struct Net {
  using Norm = BatchNorm<"bn1", 8>;
  using Parameters = ParameterList<Parameter<"fc.weight", float, 8, 8>, Norm>;
#ifndef REJECT
  using Buffers = BufferList<Norm>;
#endif
  Norm norm;
};

void use(Net& net, detail::BareStep<Net>& step, HostView<float, 4, 8> x, HostView<float, 4, 8> y) {
  net.norm.forward(step, x, y);
}
