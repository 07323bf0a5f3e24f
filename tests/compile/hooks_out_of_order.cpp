// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: these hooks cannot follow each other
#include "lockstep/hook/compress_to.hpp"
#include "lockstep/hook/top_k.hpp"
#include "lockstep/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Hooks<TopK<0.1>, CompressTo<Half>>>;
#else
using Job = detail::Composed<Net, Hooks<CompressTo<Half>, TopK<0.1>>>;
#endif
