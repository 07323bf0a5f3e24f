// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a batch norm takes views of rank 2, 3 or 4
#include "lockstep/detail/norm/batch_norm.hpp"

using namespace lockstep;

struct Net {
  using Norm = BatchNorm<"bn1", 8>;
  using Parameters = ParameterList<Norm>;
  using Buffers = BufferList<Norm>;
  Norm norm;
};

#ifdef REJECT
using Values = HostView<float, 8>;
#else
using Values = HostView<float, 4, 8>;
#endif

void use(Net& net, detail::BareStep<Net>& step, Values x, Values y) {
  net.norm.forward(step, x, y);
}
