// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: map cannot call its function with the samples of this source
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/pipeline.hpp"

using namespace lockstep;

#ifdef REJECT
using Sample = OwnedSample<float, std::int32_t>;  // those of a source in memory are views
#else
using Sample = LabelledSample<float, std::int32_t>;
#endif

float sum(const InMemoryDataset<float, std::int32_t>& data, DistributedSampler<>& sampler) {
  const auto train = data | map([](const Sample& sample) {
                       return OwnedSample<float, std::int32_t>{{sample.inputs[0]}, sample.label};
                     });
  float total = 0;
  for (const auto& batch : DataLoader(train, sampler, {})) total += batch.inputs[0];
  return total;
}
