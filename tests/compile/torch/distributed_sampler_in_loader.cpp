// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: DistributedSampler is for lockstep's DataLoader; give LibTorch's loader a RankSampler
#include <torch/data.h>

#include "lockstep/detail/torch/data.hpp"

using namespace lockstep;

#ifdef REJECT
using Chosen = DistributedSampler<>;
#else
using Chosen = RankSampler<>;
#endif

void load(::torch::data::datasets::TensorDataset data, const Chosen& sampler) {
  ::torch::data::make_data_loader(std::move(data), sampler, 4);
}
