// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: Masked gives duplicates weight 0, and the batches of LibTorch
#include "lockstep/detail/torch/data.hpp"

using namespace lockstep;

#ifdef REJECT
using Remainder = Masked;
#else
using Remainder = Exact;
#endif

std::size_t draws(const RankSampler<Remainder>& sampler) { return sampler.size(); }
