// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The orders of samples: which sample is at each place of a rank's share.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/data/block_order.hpp"
#include "lockstep/data/index_list.hpp"
#include "lockstep/data/keyed_permutation.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/data/torch_permutation.hpp"

namespace lockstep::detail {

/// What keyed orders of an epoch are made from. It is not seed + epoch, under which epoch 1 of seed
/// 0 would be epoch 0 of seed 1.
constexpr std::uint64_t epoch_key(Seed seed, Epoch epoch) {
  return random_at(mix_bits(seed.value()), epoch.value());
}

/// An order: `prepare(share, seed, epoch)` once an epoch, then `at(share, k)` gives the k-th sample
/// of the share.
template <class Order>
class EpochOrder;

template <>
class EpochOrder<InOrder> {
 public:
  void prepare(const auto&, Seed, Epoch) {}
  std::size_t at(const auto& share, std::size_t k) const { return share.place(k); }
};

/// Samples are computed, not listed, so the first one is there at once.
template <>
class EpochOrder<KeyedShuffle> {
 public:
  void prepare(const auto& share, Seed seed, Epoch epoch) {
    permutation_ = {share.samples(), epoch_key(seed, epoch)};
  }
  std::size_t at(const auto& share, std::size_t k) const { return permutation_[share.place(k)]; }

 private:
  KeyedPermutation permutation_;
};

template <std::size_t Block, std::size_t Window>
class EpochOrder<BlockShuffle<Block, Window>> {
 public:
  void prepare(const auto& share, Seed seed, Epoch epoch) {
    order_ = {share.samples(), Block, Window, epoch_key(seed, epoch)};
  }
  std::size_t at(const auto& share, std::size_t k) const { return order_[share.place(k)]; }

 private:
  BlockOrder order_;
};

/// The whole permutation exists only while the share is copied from it: 4 bytes a sample then, 4
/// bytes a draw afterwards.
template <>
class EpochOrder<TorchShuffle> {
 public:
  void prepare(const auto& share, Seed seed, Epoch epoch) {
    if (share.samples() > std::numeric_limits<std::uint32_t>::max())
      detail::fail("DistributedSampler", {"TorchShuffle lists its ", share.samples(), " samples"},
                   "use KeyedShuffle, which needs no memory, from 2^32 samples on");
    IndexList permutation(share.samples());
    torch_permutation(std::span(permutation), seed.value() + epoch.value());
    if (share.world() == WorldSize{1} && share.first() == 0) {
      drawn_ = std::move(permutation);
      return;
    }
    drawn_.resize(share.size());
    for (std::size_t k = 0; k != drawn_.size(); ++k) drawn_[k] = permutation[share.place(k)];
  }
  std::size_t at(const auto&, std::size_t k) const { return drawn_[k]; }

 private:
  IndexList drawn_;
};

}  // namespace lockstep::detail
