// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A 64-bit hash the compiler can evaluate: of names for look-up, of jobs for fingerprints.

#include <concepts>
#include <cstdint>
#include <string_view>

namespace lockstep::detail {

/// FNV-1a (Fowler, Noll, Vo). Fed with names and numbers only, never with addresses or a
/// compiler's spelling of a type, so that ranks built by different compilers agree.
class Hash {
 public:
  constexpr Hash& text(std::string_view text) {
    for (char c : text) byte(static_cast<unsigned char>(c));
    return number(text.size());  // "ab","c" and "a","bc" differ
  }

  constexpr Hash& number(std::uint64_t n) {
    for (int shift = 0; shift < 64; shift += 8) byte(static_cast<unsigned char>(n >> shift));
    return *this;
  }

  constexpr std::uint64_t value() const { return state_; }

 private:
  constexpr void byte(unsigned char b) { state_ = (state_ ^ b) * 0x100000001b3u; }

  std::uint64_t state_ = 0xcbf29ce484222325u;
};

constexpr std::uint64_t hash_of(std::string_view text) { return Hash{}.text(text).value(); }

}  // namespace lockstep::detail
