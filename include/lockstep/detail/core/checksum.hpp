// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A 64-bit checksum for files, computed at the speed of memory.

#include <bit>
#include <cstring>

#include "lockstep/detail/core/hash.hpp"

namespace lockstep::detail {

/// Eight lanes consume the data's 64-bit words in turn, two per step. Steps, and the joining of
/// lanes, are bijections: data that differ within one word never have the same checksum, others
/// hardly ever. Not cryptographic; the same on every machine and for any division into calls.
class Checksum {
 public:
  Checksum& add(std::span<const std::byte> bytes);
  Checksum& add(std::string_view bytes) { return add(std::as_bytes(std::span(bytes))); }

  std::uint64_t value() const;

 private:
  static constexpr std::size_t lane_count = 8;
  static constexpr std::size_t block_bytes = 16 * lane_count;
  using Lanes = std::array<std::uint64_t, lane_count>;

  static void add_block(Lanes& lanes, const std::byte* block);

  Lanes lanes_{random_at(0, 0), random_at(0, 1), random_at(0, 2), random_at(0, 3),
               random_at(0, 4), random_at(0, 5), random_at(0, 6), random_at(0, 7)};
  std::array<std::byte, block_bytes> rest_{};  // the bytes after the last whole block
  std::uint64_t length_ = 0;
};

/// As in files: 16 hexadecimal digits.
std::string checksum_text(std::uint64_t checksum);

/// Empty where `text` is no checksum.
std::optional<std::uint64_t> checksum_from(std::string_view text);

}  // namespace lockstep::detail
