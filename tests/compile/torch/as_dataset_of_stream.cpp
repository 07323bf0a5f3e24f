// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: as_dataset takes data sets of LibTorch's that have get(index)
#include "lockstep/detail/torch/data.hpp"

using namespace lockstep;

struct Stream {
  static std::optional<std::size_t> size() { return 5; }
#ifdef REJECT
  ::torch::data::Example<> next();
#else
  using ExampleType = ::torch::data::Example<>;
  ExampleType get(std::size_t);
#endif
};

void use() { as_dataset(Stream()); }
