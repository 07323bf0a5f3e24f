// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `checksum.hpp`.

#include <algorithm>
#include <utility>

#include "lockstep/core/checksum.hpp"

namespace lockstep::detail {

/// Eight bytes as a number, the first the lowest, whatever the machine's own order is.
LOCKSTEP_INLINE std::uint64_t little_endian_word(const std::byte* bytes) {
  std::uint64_t word = 0;
  if constexpr (std::endian::native == std::endian::little) {
    std::memcpy(&word, bytes, sizeof word);
  } else {
    for (int i = 7; i >= 0; --i) word = word << 8 | std::to_integer<std::uint64_t>(bytes[i]);
  }
  return word;
}

LOCKSTEP_INLINE void Checksum::add_block(Lanes& lanes, const std::byte* block) {
  // Each line is a bijection. The first two let every bit change at least one more; the product of
  // the last spreads what has changed, and one for two words is what it may cost.
  const auto step = [](std::uint64_t lane, std::uint64_t first, std::uint64_t second) {
    lane ^= first;
    lane ^= lane >> 29;
    lane += lane << 21;
    lane ^= second;
    return (lane ^ (lane >> 32)) * golden_step;
  };
  [&]<std::size_t... Lane>(std::index_sequence<Lane...>) {
    ((lanes[Lane] = step(lanes[Lane], little_endian_word(block + 8 * Lane),
                         little_endian_word(block + block_bytes / 2 + 8 * Lane))),
     ...);
  }(std::make_index_sequence<lane_count>());
}

LOCKSTEP_INLINE Checksum& Checksum::add(std::span<const std::byte> bytes) {
  if (bytes.empty()) return *this;
  const std::size_t held = length_ % block_bytes;
  length_ += bytes.size();
  if (held != 0) {
    const std::size_t more = std::min(block_bytes - held, bytes.size());
    std::memcpy(rest_.data() + held, bytes.data(), more);
    bytes = bytes.subspan(more);
    if (held + more != block_bytes) return *this;
    add_block(lanes_, rest_.data());
  }
  Lanes lanes = lanes_;  // a copy, which the compiler keeps in registers
  const std::byte* block = bytes.data();
  const std::byte* const end = block + bytes.size() / block_bytes * block_bytes;
  for (; block != end; block += block_bytes) add_block(lanes, block);
  lanes_ = lanes;
  if (bytes.size() % block_bytes != 0) std::memcpy(rest_.data(), end, bytes.size() % block_bytes);
  return *this;
}

LOCKSTEP_INLINE std::uint64_t Checksum::value() const {
  Lanes lanes = lanes_;
  if (const std::size_t held = length_ % block_bytes; held != 0) {
    std::array<std::byte, block_bytes> last{};  // filled up with zeros; the length tells them apart
    std::memcpy(last.data(), rest_.data(), held);
    add_block(lanes, last.data());
  }
  std::uint64_t value = mix_bits(length_);
  for (const std::uint64_t lane : lanes) value = mix_bits((value ^ lane) + golden_step);
  return value;
}

LOCKSTEP_INLINE std::uint64_t checksum_of(std::span<const std::byte> bytes) {
  return Checksum().add(bytes).value();
}

LOCKSTEP_INLINE std::string checksum_text(std::uint64_t checksum) {
  std::string text(16, '0');
  for (char& digit : text) {
    digit = "0123456789abcdef"[checksum >> 60];
    checksum <<= 4;
  }
  return text;
}

LOCKSTEP_INLINE std::optional<std::uint64_t> checksum_from(std::string_view text) {
  if (text.size() != 16) return std::nullopt;
  std::uint64_t checksum = 0;
  for (const char digit : text) {
    const std::size_t value = std::string_view("0123456789abcdef").find(digit);
    if (value == std::string_view::npos) return std::nullopt;
    checksum = checksum << 4 | value;
  }
  return checksum;
}

}  // namespace lockstep::detail
