// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a batch norm has another number of features than in the model's lists
#include "lockstep/detail/norm/batch_norm.hpp"

using namespace lockstep;

struct Net {
  using Norm = BatchNorm<"bn1", 8>;
  using Parameters = ParameterList<Norm>;
#ifdef REJECT
  using Buffers = BufferList<BatchNorm<"bn1", 4>>;
#else
  using Buffers = BufferList<Norm>;
#endif
  Norm norm;
};

void use(Net& net, detail::BareStep<Net>& step, HostView<float, 4, 8> x, HostView<float, 4, 8> y) {
  net.norm.forward(step, x, y);
}
