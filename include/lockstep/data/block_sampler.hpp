// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The samples of a rank in one block, in order: how outputs come back in the order of the
/// data.

#include <algorithm>
#include <cstddef>

#include "lockstep/core/strong.hpp"
#include "lockstep/data/sampler_state.hpp"

namespace lockstep::detail {

/// Every rank but the last ones has ceil(n / W) samples, so that the blocks of all ranks, padded to
/// that length, are the samples in order with all padding at the end. It has no epochs.
class BlockSampler {
 public:
  static constexpr bool masks = false;

  BlockSampler(std::size_t samples, WorldSize world, Rank rank)
      : samples_(samples),
        longest_((samples + world.value() - 1) / world.value()),
        first_(std::min(rank.value() * longest_, samples)) {}

  std::size_t samples() const { return samples_; }
  /// The number of samples that the first rank has.
  std::size_t longest() const { return longest_; }
  std::size_t first() const { return first_; }
  std::size_t size() const { return std::min(longest_, samples_ - first_); }
  std::size_t operator[](std::size_t k) const { return first_ + k; }
  static float weight(std::size_t) { return 1; }

  // What loaders ask of every sampler.
  std::size_t position() const { return position_; }
  void start() { position_ = 0; }
  void advance(std::size_t draws) { position_ += draws; }
  SamplerState state() const { return {}; }
  void resume(const SamplerState&) {}

  // For a rank that reads for others: see DistributedSampler.
  BlockSampler share_of(Rank rank) const {
    BlockSampler share = *this;
    share.first_ = std::min(rank.value() * longest_, samples_);
    return share;
  }
  BlockSampler whole() const { return {samples_, WorldSize{1}, Rank{0}}; }
  std::size_t place(std::size_t k) const { return first_ + k; }

 private:
  std::size_t samples_;
  std::size_t longest_;
  std::size_t first_;
  std::size_t position_ = 0;
};

}  // namespace lockstep::detail
