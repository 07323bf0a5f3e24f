// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Orders of samples: PyTorch's CPU `randperm`, number for number, and keyed permutations.

#include <sys/mman.h>
#include <bit>
#include <new>
#include <numeric>

#include "lockstep/detail/core/bytes.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/policy/policy.hpp"

namespace lockstep::detail {

/// MT19937 (Matsumoto and Nishimura), with the draws of `std::mt19937(seed)`, 624 per call.
class MersenneTwister {
 public:
  static constexpr std::size_t block_size = 624;
  using Block = std::array<std::uint32_t, block_size>;

  explicit constexpr MersenneTwister(std::uint32_t seed) {
    state_[0] = seed;
    for (std::uint32_t i = 1; i != block_size; ++i)
      state_[i] = 1812433253u * (state_[i - 1] ^ (state_[i - 1] >> 30)) + i;
  }

  constexpr void draw(Block& draws) {
    constexpr std::size_t ahead = 397;
    constexpr std::size_t behind = block_size - ahead;
    std::uint32_t* const s = state_.data();
    for (std::size_t i = 0; i != behind; ++i) s[i] = s[i + ahead] ^ twist(s[i], s[i + 1]);
    for (std::size_t i = behind; i != block_size - 1; ++i)
      s[i] = s[i - behind] ^ twist(s[i], s[i + 1]);
    s[block_size - 1] = s[ahead - 1] ^ twist(s[block_size - 1], s[0]);
    for (std::size_t i = 0; i != block_size; ++i) draws[i] = temper(s[i]);
  }

 private:
  static constexpr std::uint32_t twist(std::uint32_t high, std::uint32_t low) {
    const std::uint32_t joined = (high & 0x80000000u) | (low & 0x7fffffffu);
    return (joined >> 1) ^ ((0u - (low & 1u)) & 0x9908b0dfu);
  }

  static constexpr std::uint32_t temper(std::uint32_t y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
  }

  std::array<std::uint32_t, block_size> state_{};
};

/// From this many items on PyTorch draws 64 bits, because 32 would favour small numbers.
inline constexpr std::size_t wide_draws_from = std::numeric_limits<std::uint32_t>::max() / 20;

/// Replaces the k-th draw by `draw % (left - k) + k`, the distance of the k-th swap from the first
/// of `left` items. Returns the number of items of the block. Division in double vectorises and is
/// exact: the quotient of two 32-bit integers, rounded to 53 bits, stays below the next integer.
inline std::uint32_t find_targets(MersenneTwister::Block& draws, std::uint32_t left) {
  const std::uint32_t count = std::min<std::uint32_t>(MersenneTwister::block_size, left);
  for (std::uint32_t k = 0; k != count; ++k) {
    const std::uint32_t choices = left - k;
    const auto quotient = static_cast<std::uint32_t>(static_cast<double>(draws[k]) / choices);
    draws[k] += k - quotient * choices;
  }
  return count;
}

/// Fisher-Yates, forwards: swaps item i with one from i on; prefetches for the next block.
template <std::unsigned_integral Index>
void shuffle_with_narrow_draws(std::span<Index> items, std::uint32_t seed) {
  std::iota(items.begin(), items.end(), Index{0});
  MersenneTwister generator(seed);
  MersenneTwister::Block targets;
  MersenneTwister::Block next_targets;
  auto left = static_cast<std::uint32_t>(items.size());
  generator.draw(targets);
  std::uint32_t count = find_targets(targets, left);
  for (Index* first = items.data(); left != 0;) {
    left -= count;
    generator.draw(next_targets);
    const std::uint32_t next_count = find_targets(next_targets, left);
    for (std::uint32_t k = 0; k != count; ++k) {
      if (k < next_count) __builtin_prefetch(first + count + next_targets[k], 1);
      std::swap(first[k], first[targets[k]]);
    }
    first += count;
    count = next_count;
    targets = next_targets;
  }
}

/// Fisher-Yates, inside out: item i is appended to the first i, then swapped with one of them.
template <std::unsigned_integral Index>
void shuffle_with_wide_draws(std::span<Index> items, std::uint32_t seed) {
  MersenneTwister generator(seed);
  MersenneTwister::Block draws;
  constexpr std::size_t pairs = MersenneTwister::block_size / 2;
  for (std::size_t begin = 0; begin < items.size(); begin += pairs) {
    generator.draw(draws);
    const std::size_t count = std::min(pairs, items.size() - begin);
    for (std::size_t k = 0; k != count; ++k) {
      const std::size_t i = begin + k;
      const std::uint64_t draw = std::uint64_t{draws[2 * k]} << 32 | draws[2 * k + 1];
      const std::size_t target = draw % (i + 1);
      items[i] = static_cast<Index>(i);
      items[i] = std::exchange(items[target], static_cast<Index>(i));
    }
  }
}

/// Fills `items` as `torch.randperm(items.size())` does after `torch.manual_seed(seed)`.
template <std::unsigned_integral Index>
void torch_permutation(std::span<Index> items, std::uint64_t seed) {
  const auto low_bits = static_cast<std::uint32_t>(seed);  // all that PyTorch's generator uses
  if (items.size() < wide_draws_from) {
    shuffle_with_narrow_draws(items, low_bits);
  } else {
    shuffle_with_wide_draws(items, low_bits);
  }
}

/// A bijection of 0 .. size-1 chosen by a key: a Feistel network over the smallest power of two
/// that holds them, with cycle walking (Black and Rogaway, 2002). Integers only: the same on every
/// platform, for up to 2^63 items. Eight rounds of a 64-bit mixer over at least eight bits: four
/// rounds suffice for wide halves (Luby and Rackoff), but with four bits the orders of five items
/// stay unequal. With eight, chi-square over all orders of 3 to 7 items finds nothing.
class KeyedPermutation {
 public:
  static constexpr std::size_t rounds = 8;
  static constexpr std::size_t least_bits = 8;

  constexpr KeyedPermutation() = default;

  constexpr KeyedPermutation(std::size_t size, std::uint64_t key) : size_(size) {
    if (size > std::size_t{1} << 63)
      throw Error("KeyedPermutation", "more than 2^63 items", "split the data set");
    const auto bits = std::max<std::size_t>(least_bits, size == 0 ? 0 : std::bit_width(size - 1));
    low_bits_ = bits / 2;
    low_mask_ = (std::uint64_t{1} << low_bits_) - 1;
    high_mask_ = (std::uint64_t{1} << (bits - low_bits_)) - 1;
    for (std::size_t round = 0; round != rounds; ++round) keys_[round] = random_at(key, round);
  }

  constexpr std::size_t size() const { return size_; }

  constexpr std::size_t operator[](std::size_t i) const { return at(i, 0); }

  /// The image of item i in another permutation, chosen by a random tweak: cheaper than many keys.
  constexpr std::size_t at(std::size_t i, std::uint64_t tweak) const {
    do i = encrypt(i, tweak);
    while (i >= size_);
    return i;
  }

 private:
  /// Each half is changed by the other in turn, so that they may differ in width.
  constexpr std::uint64_t encrypt(std::uint64_t x, std::uint64_t tweak) const {
    std::uint64_t low = x & low_mask_;
    std::uint64_t high = x >> low_bits_;
    for (std::size_t round = 0; round != rounds; round += 2) {
      high ^= mix_bits(low ^ keys_[round] ^ tweak) & high_mask_;
      low ^= mix_bits(high ^ keys_[round + 1] ^ tweak) & low_mask_;
    }
    return high << low_bits_ | low;
  }

  std::size_t size_ = 0;
  std::size_t low_bits_ = 0;
  std::uint64_t low_mask_ = 0;
  std::uint64_t high_mask_ = 0;
  std::array<std::uint64_t, rounds> keys_{};
};

/// An allocator for shuffles, whose random access spends as much time on TLB misses as on memory
/// with 4 KiB pages. A shuffle writes elements first, so that `resize` leaves them uninitialised.
template <class T>
struct HugePageAllocator {
  using value_type = T;

  HugePageAllocator() = default;
  template <class U>
  HugePageAllocator(const HugePageAllocator<U>&) {}  // NOLINT: allocators convert

  T* allocate(std::size_t count) {
    const std::size_t bytes = saturating_product(count, sizeof(T));
    void* const memory = ::operator new(bytes, alignment(count));
    // only a hint: without huge pages, accesses are slower
    if (bytes >= huge_page) ::madvise(memory, bytes, MADV_HUGEPAGE);
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t count) { ::operator delete(memory, alignment(count)); }

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

using IndexList = std::vector<std::uint32_t, HugePageAllocator<std::uint32_t>>;

/// Blocks lie in slots in a keyed order; `window` slots are a window, whose positions have the
/// samples of its blocks in another keyed order. If the last block is short, its slot is drawn
/// first and the other blocks fill the other slots, so that no search finds where positions shift.
class BlockOrder {
 public:
  constexpr BlockOrder() = default;

  constexpr BlockOrder(std::size_t samples, std::size_t block, std::size_t window,
                       std::uint64_t key) {
    if (samples == 0) return;
    block_ = std::min(block, samples);  // so that no product below exceeds 2 * samples
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

  constexpr std::size_t operator[](std::size_t index) const {
    // From here on, the window with the short block has unused positions at its end.
    if (index >= short_end_) index += missing_;
    const std::size_t window = index / in_window_.size();
    const std::size_t first_slot = window * window_;
    std::size_t at = index - first_slot * block_;
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

  std::size_t block_ = 1;         // samples per block
  std::size_t window_ = 1;        // slots per window
  std::size_t slots_ = 0;         // number of blocks
  std::size_t missing_ = 0;       // samples that the last block lacks
  std::size_t short_slot_ = 0;    // slot of the last block
  std::size_t short_window_ = 0;  // window of that slot
  std::size_t short_end_ = 0;     // first position behind that window
  std::size_t last_window_ = 0;   // may have fewer slots
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

/// PyTorch's permutation, sample for sample. Every rank computes all and keeps its share.
struct TorchShuffle : WithName<"TorchShuffle">, Choice<axes::Order> {};

/// A keyed bijection: no memory, no start-up time, any number of samples.
struct KeyedShuffle : WithName<"KeyedShuffle">, Choice<axes::Order> {
  static constexpr detail::KeyedPermutation of(std::size_t samples, std::uint64_t key) {
    return {samples, key};
  }
};

/// Shuffles blocks of neighbouring samples, for fast sequential reads, and samples in a window of
/// blocks: `BlockShuffle<4096, 16>` draws from 16 blocks of 4,096 samples until they are used up.
template <std::size_t Block, std::size_t Window>
struct BlockShuffle : Choice<axes::Order> {
  static_assert(Block != 0 && Window != 0,
                "lockstep: BlockShuffle<Block, Window> needs blocks of one sample or more and "
                "windows of one block or more; write BlockShuffle<4096, 16>, say");
  static constexpr std::string_view name = "BlockShuffle";
  static constexpr void fingerprint(detail::Hash& hash) { hash.number(Block).number(Window); }
  static constexpr detail::BlockOrder of(std::size_t samples, std::uint64_t key) {
    return {samples, Block, Window, key};
  }
};

/// The order of the data set.
struct InOrder : WithName<"InOrder">, Choice<axes::Order> {};

}  // namespace lockstep

namespace lockstep::detail {

/// The key of an epoch's order. With seed + epoch, epoch 1 of seed 0 would equal epoch 0 of seed 1.
constexpr std::uint64_t epoch_key(Seed seed, Epoch epoch) {
  return random_at(mix_bits(seed.value()), epoch.value());
}

/// `prepare(share, seed, epoch)` once per epoch, then `at(share, k)` is the share's k-th sample.
template <class Order>
class EpochOrder {
 public:
  void prepare(const auto& share, Seed seed, Epoch epoch) {
    order_ = Order::of(share.samples(), epoch_key(seed, epoch));
  }
  std::size_t at(const auto& share, std::size_t k) const { return order_[share.index(k)]; }

 private:
  decltype(Order::of(0, 0)) order_;
};

template <>
class EpochOrder<InOrder> {
 public:
  void prepare(const auto&, Seed, Epoch) {}
  std::size_t at(const auto& share, std::size_t k) const { return share.index(k); }
};

/// Memory: 4 bytes per sample while the share is copied, afterwards 4 bytes per draw.
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
    for (std::size_t k = 0; k != drawn_.size(); ++k) drawn_[k] = permutation[share.index(k)];
  }
  std::size_t at(const auto&, std::size_t k) const { return drawn_[k]; }

 private:
  IndexList drawn_;
};

}  // namespace lockstep::detail
