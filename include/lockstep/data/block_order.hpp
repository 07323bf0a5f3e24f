// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The order of `BlockShuffle`: blocks of neighbouring samples are shuffled, then the samples
/// of a few blocks among each other. Any sample of it, in constant time and without memory.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lockstep/core/hash.hpp"
#include "lockstep/data/keyed_permutation.hpp"

namespace lockstep::detail {

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
