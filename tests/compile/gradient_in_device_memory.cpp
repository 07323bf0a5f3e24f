// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: this step's gradients are in device memory
#include "lockstep/detail/bucket/step.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"slope", float>>;
};

#ifdef REJECT
using Memory = DeviceMemory;
#else
using Memory = HostMemory;
#endif
void use(const detail::BareStep<Net, Buckets<>, Memory>& step) { step.set_grad("slope"_p, 1); }
