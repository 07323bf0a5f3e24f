// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Host statistics and errors of norms.

#include "lockstep/detail/norm/statistics.hpp"
#include "lockstep/detail/norm/work.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE void HostStatistics::merge(const double* packets, std::size_t world, double eps,
                                           std::string_view name) {
  count_ = count_of_packets(packets, world, channels_);
  if (count_ == 1) [[unlikely]]
    reject_norm(name, NormFault::values);
  for (std::size_t c = 0; c != channels_; ++c) {
    const Moments moments = merged_packets(packets, world, channels_, c);
    mean_[c] = moments.mean;
    m2_[c] = moments.m2;
    inverse_[c] = inverse_deviation(variance(c), eps);
  }
}

LOCKSTEP_INLINE void reject_norm(std::string_view layer, NormFault fault, std::size_t given,
                                 std::size_t wanted) {
  switch (fault) {
    case NormFault::features:
      fail(layer, {"the norm has ", wanted, " features, and was given a tensor with ", given},
           "give it a tensor whose channels are its features: the second extent of a batch norm's, "
           "the last of a layer norm's");
    case NormFault::shapes:
      fail(layer, {"the views that the norm was given have different extents"},
           "give outputs and gradients the extents of the input");
    case NormFault::backward:
      fail(layer,
           {"backward of the norm has no statistics: its latest forward was of another shape, "
            "of an evaluation, or there was none"},
           "call forward of the same layer in the same step; every place in a network has a layer "
           "of its own");
    case NormFault::input:
      fail(layer, {"x and y of the norm are the same memory"},
           "give y memory of its own: backward reads x");
    case NormFault::residual:
      fail(layer, {"dx and dresidual of the norm are the same memory"},
           "give them memory of their own; one of them may be dy's");
    case NormFault::values:
      break;
  }
  fail(layer, {"expected more than 1 value per channel when training, and there is one"},
       "train on more samples at once; where the last batch of an epoch is that small, drop it or "
       "pad it");
}

}  // namespace lockstep::detail
