// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `dp_shares.hpp`.

#include <string>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/strategy/dp_shares.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE DpShares::DpShares(std::size_t replicas, bool needs_all)
    : needs_all_(needs_all), parts_(replicas) {
  set({});
}

LOCKSTEP_INLINE void DpShares::set(std::vector<double> weights) {
  bool positive = true;
  for (const double weight : weights) positive = positive && weight > 0;
  if (!positive || (!weights.empty() && weights.size() != parts_.size())) {
    throw Error("set_shares",
                text({weights.size(), " numbers for ", parts_.size(), " replicas",
                      positive ? "" : ", not all of them above zero"}),
                "give every replica a number above zero");
  }
  weights_ = std::move(weights);
  if (needs_all_ && weights_.empty()) weights_.assign(parts_.size(), 1);
}

LOCKSTEP_INLINE void DpShares::refuse_empty() {
  throw Error("DP", "the batch is empty", "give it a sample for one replica at least");
}

LOCKSTEP_INLINE void DpShares::require_samples() const {
  for (std::size_t i = 0; i != parts_.size(); ++i) {
    if (parts_[i].samples.count != 0) continue;
    throw Error("DP",
                text({"replica ", i, " has no sample of a batch of ", parts_[i].all,
                      ", and batch norms take their statistics over all ", parts_.size(),
                      " replicas (Norms<Synced>)"}),
                "give every replica a sample, and leave out a last batch that is too small "
                "(drop_last), or use Norms<Local>");
  }
}

}  // namespace lockstep::detail
