// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: tensors takes samples with `inputs` and `label`
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/pipeline.hpp"
#include "lockstep/detail/torch/collate.hpp"

using namespace lockstep;

struct Word {
  std::vector<float> inputs;
#ifdef REJECT
  std::vector<std::string> label;
#else
  std::int32_t label = 0;
#endif
};

std::size_t load(const InMemoryDataset<float, std::int32_t>& data) {
  const auto words = data | map([](const auto&) { return Word(); }) | tensors();
  return words.size();
}
