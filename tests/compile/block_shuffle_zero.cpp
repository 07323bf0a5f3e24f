// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: BlockShuffle<Block, Window> needs blocks of one sample or more
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Sampler<Distributed, Padding, BlockShuffle<4096, 0>>>;
#else
using Job = Trainer<Net, Sampler<Distributed, Padding, BlockShuffle<4096, 16>>>;
#endif
