// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: collate cannot call its function with the samples of this source
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/pipeline.hpp"

using namespace lockstep;

using Sample = LabelledSample<float, std::int32_t>;
using Batch = LabelledBatch<float, std::int32_t>;
#ifdef REJECT
constexpr auto join = [](const std::vector<Sample>&, Batch&) {};
#else
constexpr auto join = [](std::span<const Sample>, Batch&) {};
#endif

float sum(const InMemoryDataset<float, std::int32_t>& data, DistributedSampler<>& sampler) {
  const auto train = data | collate<Batch>(join);
  float total = 0;
  for (const auto& batch : DataLoader(train, sampler, {})) total += batch.inputs[0];
  return total;
}
