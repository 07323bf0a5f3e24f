// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model declares no buffer of this name
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

struct Normed : Net {
  using Buffers = BufferList<Buffer<"mean", float, 3>>;
};

#ifdef REJECT
void use(const detail::BareStep<Normed>& step) { step.buffer("maen"_p); }
#else
void use(const detail::BareStep<Normed>& step) { step.buffer("mean"_p)(0) = 1; }
#endif
