// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a norm is given a tensor with another number of channels than it has features
#include "lockstep/detail/norm/batch_norm.hpp"

using namespace lockstep;

struct Net {
  using Norm = BatchNorm<"bn1", 8>;
  using Parameters = ParameterList<Norm>;
  using Buffers = BufferList<Norm>;
  Norm norm;
};

#ifdef REJECT
using Values = HostView<float, dynamic, 9>;
#else
using Values = HostView<float, dynamic, 8>;
#endif

void use(Net& net, detail::BareStep<Net>& step, Values x, Values y) {
  net.norm.forward(step, x, y);
}
