// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: map's function returns nothing and takes the sample by value
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/pipeline.hpp"

using namespace lockstep;

#ifdef REJECT
constexpr auto relabel = [](auto sample) {
  if (sample.label == 3) sample.label = 8;
};
#else
constexpr auto relabel = [](auto& sample) {
  if (sample.label == 3) sample.label = 8;
};
#endif

float sum(const InMemoryDataset<float, std::int32_t>& data, DistributedSampler<>& sampler) {
  const auto train = data | map(relabel);
  float total = 0;
  for (const auto& batch : DataLoader(train, sampler, {})) total += batch.inputs[0];
  return total;
}
