// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The parts of host_norm.hpp that are no templates.

#include "lockstep/core/macros.hpp"
#include "lockstep/norm/host_norm.hpp"
#include "lockstep/norm/norm_views.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE bool NormWork<HostMemory>::reserve(std::size_t channels, std::size_t world) {
  const std::size_t packets = (world == 1 ? 1 : world + 1) * packet_size(channels);
  if (channels == channels_ && packets <= packets_.size()) return false;
  channels_ = channels;
  packets_.resize(std::max(packets, packets_.size()));
  mean_.resize(channels);
  m2_.resize(channels);
  inverse_.resize(channels);
  sums_.resize(2 * channels);
  return true;
}

LOCKSTEP_INLINE void NormWork<HostMemory>::settle_packets(const double* packets, std::size_t world,
                                                          const BatchNormOptions& options,
                                                          std::string_view name) {
  count_ = count_of_packets(packets, world, channels_);
  if (count_ == 1) [[unlikely]]
    refuse_single_value(name);
  for (std::size_t c = 0; c != channels_; ++c) {
    const Moments moments = merged_packets(packets, world, channels_, c);
    mean_[c] = moments.mean;
    m2_[c] = moments.m2;
    inverse_[c] = inverse_deviation(count_ == 0 ? 0 : moments.m2 / count_, options.eps);
  }
}

}  // namespace lockstep::detail
