// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: stacked, padded and ragged take samples with
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/pipeline.hpp"

using namespace lockstep;

struct Word {
  std::vector<float> inputs;
#ifndef REJECT
  std::int32_t label = 0;
#endif
};

float sum(const InMemoryDataset<float, std::int32_t>& data, DistributedSampler<>& sampler) {
  const auto train = data | map([](const auto&) { return Word(); }) | padded(0);
  float total = 0;
  for (const auto& batch : DataLoader(train, sampler, {})) total += batch.inputs[0];
  return total;
}
