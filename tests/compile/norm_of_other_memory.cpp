// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a layer's views are of the memory of its step
#include "lockstep/detail/norm/layer_norm.hpp"

using namespace lockstep;

struct Net {
  using Norm = LayerNorm<"ln1", 8>;
  using Parameters = ParameterList<Norm>;
  Norm norm;
};

#ifdef REJECT
using Values = DeviceView<float, 4, 8>;
#else
using Values = HostView<float, 4, 8>;
#endif

void use(Net& net, detail::BareStep<Net>& step, Values x, Values y) {
  net.norm.forward(step, x, y);
}
