// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: ParallelStrategy<DP> cannot cut this batch into shares
#include <vector>

#include "lockstep/detail/strategy/scatter.hpp"

using namespace lockstep;

struct Table {
  std::vector<float> values;
  std::size_t size() const { return values.size(); }
#ifndef REJECT
  void slice(std::size_t, std::size_t, Table&) const {}
#endif
};

bool ok() { return detail::require_scattering<Table>(); }
