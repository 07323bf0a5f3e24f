// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: labels become a tensor if they are numbers
#include "lockstep/detail/torch/batch.hpp"

using namespace lockstep;

#ifdef REJECT
using Label = std::string;
#else
using Label = std::int16_t;
#endif

at::Tensor labels(const std::vector<Label>& all) { return lockstep::detail::label_tensor(all); }
