// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The statistics of norms on the host, and their errors.

#include <algorithm>

#include "lockstep/core/error.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/norm/statistics.hpp"
#include "lockstep/norm/work.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE bool HostStatistics::reserve(std::size_t channels, std::size_t world) {
  const std::size_t packets = (world == 1 ? 1 : world + 1) * packet_doubles(channels);
  if (channels == channels_ && packets <= packets_.size()) return false;
  channels_ = channels;
  packets_.resize(std::max(packets, packets_.size()));
  mean_.resize(channels);
  m2_.resize(channels);
  inverse_.resize(channels);
  sums_.resize(2 * channels);
  return true;
}

LOCKSTEP_INLINE void HostStatistics::merge(const double* packets, std::size_t world, double eps,
                                           std::string_view name) {
  count_ = count_of_packets(packets, world, channels_);
  if (count_ == 1) [[unlikely]]
    refuse_single_value(name);
  for (std::size_t c = 0; c != channels_; ++c) {
    const Moments moments = merged_packets(packets, world, channels_, c);
    mean_[c] = moments.mean;
    m2_[c] = moments.m2;
    inverse_[c] = inverse_deviation(variance(c), eps);
  }
}

LOCKSTEP_INLINE void refuse_features(std::string_view layer, std::size_t given,
                                     std::size_t features) {
  fail(layer, {"the norm has ", features, " features, and was given a tensor with ", given},
       "give it a tensor whose channels are its features: the second extent of a batch norm's, the "
       "last of a layer norm's");
}

LOCKSTEP_INLINE void refuse_shapes(std::string_view layer) {
  fail(layer, {"the views that the norm was given have different extents"},
       "give outputs and gradients the extents of the input");
}

LOCKSTEP_INLINE void refuse_backward(std::string_view layer) {
  fail(layer,
       {"backward of the norm has no statistics: its latest forward was of another shape, "
        "of an evaluation, or there was none"},
       "call forward of the same layer in the same step; every place in a network has a layer of "
       "its own");
}

LOCKSTEP_INLINE void refuse_same_memory(std::string_view layer, std::string_view views,
                                        std::string_view cure) {
  fail(layer, {views, " of the norm are the same memory"}, cure);
}

LOCKSTEP_INLINE void refuse_single_value(std::string_view layer) {
  fail(layer, {"expected more than 1 value per channel when training, and there is one"},
       "train on more samples at once; where the last batch of an epoch is that small, drop it or "
       "pad it");
}

}  // namespace lockstep::detail
