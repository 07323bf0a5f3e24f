// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: ParallelStrategy<DP> gives every replica a model of its own
#include <memory>

#include "lockstep/detail/trainer/wrappers.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
  std::unique_ptr<int> memory;
#ifndef REJECT
  Net replicate() const { return {}; }
#endif
};

Net another(const Net& net) { return lockstep::detail::replicate(net); }
