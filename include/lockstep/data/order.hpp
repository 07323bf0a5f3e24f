// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The orders of samples: the policies, and which sample is at each place of a rank's share.

#include <sys/mman.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/data/permutation.hpp"
#include "lockstep/policy/policy.hpp"

namespace lockstep::detail {

/// A shuffle accesses memory at random: with pages of 4 KiB, finding the page takes as long as the
/// access itself. It writes all elements before it reads them, so `resize` does not initialise
/// them.
template <class T>
struct HugePageAllocator {
  using value_type = T;

  HugePageAllocator() = default;
  template <class U>
  HugePageAllocator(const HugePageAllocator<U>&) {}  // NOLINT: allocators convert

  T* allocate(std::size_t count) {
    const std::size_t bytes = saturating_product(count, sizeof(T));
    void* const memory = ::operator new(bytes, alignment(count));
    // only a hint: if it is refused, accesses are slower
    if (bytes >= huge_page) ::madvise(memory, bytes, MADV_HUGEPAGE);
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t count) { ::operator delete(memory, alignment(count)); }

  /// Elements without a value stay uninitialised.
  template <class U>
  void construct(U* element) {
    ::new (static_cast<void*>(element)) U;
  }

  friend bool operator==(HugePageAllocator, HugePageAllocator) { return true; }

 private:
  static constexpr std::size_t huge_page = 2_MiB;
  static std::align_val_t alignment(std::size_t count) {
    return std::align_val_t{count * sizeof(T) >= huge_page ? huge_page : alignof(T)};
  }
};

/// Indices below 2^32.
using IndexList = std::vector<std::uint32_t, HugePageAllocator<std::uint32_t>>;

/// Blocks lie in slots, in an order of the key; `window` slots are a window, whose places have the
/// samples of its blocks in another order of the key. The last block may be short. Then its slot is
/// drawn first and the whole blocks fill the other slots, so that it is known without a search
/// where places begin to be counted differently.
class BlockOrder {
 public:
  constexpr BlockOrder() = default;

  constexpr BlockOrder(std::size_t samples, std::size_t block, std::size_t window,
                       std::uint64_t key) {
    if (samples == 0) return;
    block_ = std::min(block, samples);  // so that no product below is beyond 2 * samples
    slots_ = (samples - 1) / block_ + 1;
    window_ = std::min(window, slots_);
    last_window_ = (slots_ - 1) / window_;
    missing_ = slots_ * block_ - samples;
    short_slot_ = random_at(key, 0) % slots_;
    short_window_ = short_slot_ / window_;
    short_end_ = std::min((short_window_ + 1) * window_, slots_) * block_ - missing_;
    whole_blocks_ = {slots_ - 1, random_at(key, 1)};
    in_window_ = {window_ * block_, random_at(key, 2)};
    in_short_ = {short_end_ - short_window_ * window_ * block_, random_at(key, 3)};
    in_last_ = {(slots_ - last_window_ * window_) * block_, random_at(key, 4)};
    windows_key_ = random_at(key, 5);
  }

  /// The sample at a place below the number of samples.
  constexpr std::size_t operator[](std::size_t place) const {
    // From here on, the window with the short block has unused places at its end.
    if (place >= short_end_) place += missing_;
    const std::size_t window = place / in_window_.size();
    const std::size_t first_slot = window * window_;
    std::size_t at = place - first_slot * block_;
    const std::uint64_t tweak = random_at(windows_key_, window);
    if (window == short_window_) {
      at = in_short_.at(at, tweak);
      if (at >= (short_slot_ - first_slot + 1) * block_ - missing_) at += missing_;
    } else {
      at = (window == last_window_ ? in_last_ : in_window_).at(at, tweak);
    }
    const std::size_t slot = at / block_;
    return block_at(first_slot + slot) * block_ + (at - slot * block_);
  }

 private:
  constexpr std::size_t block_at(std::size_t slot) const {
    if (slot == short_slot_) return slots_ - 1;
    return whole_blocks_[slot - (slot > short_slot_)];
  }

  std::size_t block_ = 1;         // samples of a block
  std::size_t window_ = 1;        // slots of a window
  std::size_t slots_ = 0;         // blocks
  std::size_t missing_ = 0;       // what the last block lacks
  std::size_t short_slot_ = 0;    // where the last block lies
  std::size_t short_window_ = 0;  // the window of that slot
  std::size_t short_end_ = 0;     // the first place behind that window
  std::size_t last_window_ = 0;   // which may have fewer slots
  KeyedPermutation whole_blocks_;
  KeyedPermutation in_window_;
  KeyedPermutation in_short_;
  KeyedPermutation in_last_;
  std::uint64_t windows_key_ = 0;
};

}  // namespace lockstep::detail

namespace lockstep {

namespace axes {
struct Order : WithName<"Order"> {};
}  // namespace axes

/// The permutation PyTorch makes, sample for sample. Every rank computes all of it and keeps its
/// share.
struct TorchShuffle : WithName<"TorchShuffle">, Choice<axes::Order> {};

/// A keyed bijection: no memory, no start-up time, any number of samples.
struct KeyedShuffle : WithName<"KeyedShuffle">, Choice<axes::Order> {};

/// For disks that want to be read in sequence: blocks of so many neighbouring samples are shuffled,
/// and the samples of so many blocks at a time among each other. `BlockShuffle<4096, 16>` draws
/// from 16 pieces of 4,096 samples until they are used up. No memory, any number of samples.
template <std::size_t Block, std::size_t Window>
struct BlockShuffle : Choice<axes::Order> {
  static_assert(Block != 0 && Window != 0,
                "lockstep: BlockShuffle<Block, Window> needs blocks of one sample or more and "
                "windows of one block or more; write BlockShuffle<4096, 16>, say");
  static constexpr std::string_view name = "BlockShuffle";
  static constexpr void fingerprint(detail::Hash& hash) { hash.number(Block).number(Window); }
};

/// Samples come in the order of the data set.
struct InOrder : WithName<"InOrder">, Choice<axes::Order> {};

}  // namespace lockstep

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
