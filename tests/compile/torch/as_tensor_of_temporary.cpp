// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: as_tensor refers to memory, and this vector or array would be gone
#include "lockstep/detail/torch/tensors.hpp"

using namespace lockstep;

std::vector<float> numbers();

at::Tensor tensor() {
#ifdef REJECT
  return as_tensor(numbers());
#else
  static const std::vector<float> kept = numbers();
  return as_tensor(kept);
#endif
}
