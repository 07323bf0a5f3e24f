// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: this has no samples that map, stacked, padded, ragged or collate could take
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/pipeline.hpp"

using namespace lockstep;

struct Files {  // loads batches, as data sets do
  using batch_type = LabelledBatch<float, std::int32_t>;
  static std::size_t size() { return 3; }
  void load(std::span<const std::size_t>, batch_type&) const {}
#ifndef REJECT
  using sample_type = OwnedSample<float, std::int32_t>;
  void read(std::size_t, sample_type&) const {}
#endif
};

float sum(const Files& files, DistributedSampler<>& sampler) {
  const auto train = files | map([](auto& sample) { sample.inputs.push_back(1); });
  float total = 0;
  for (const auto& batch : DataLoader(train, sampler, {})) total += batch.inputs[0];
  return total;
}
