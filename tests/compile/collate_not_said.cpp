// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: these samples are no rows of a LabelledBatch
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/pipeline.hpp"

using namespace lockstep;

struct Point {
  float inputs[2];
#ifndef REJECT
  int label;
#endif
};

float sum(const InMemoryDataset<float, std::int32_t>& data, DistributedSampler<>& sampler) {
  const auto train =
      data | map<Point>([](const auto& sample, Point& out) { out.inputs[0] = sample.inputs[0]; });
  float total = 0;
  for (const auto& batch : DataLoader(train, sampler, {})) total += batch.inputs[0];
  return total;
}
