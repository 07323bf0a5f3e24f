// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file SipHash-2-4, the keyed hash by which the store and its clients prove that they know the
/// job's secret without saying it.

#include <bit>
#include <cstdint>
#include <string_view>

namespace lockstep::detail {

struct SipKey {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
};

/// Aumasson and Bernstein, "SipHash: a fast short-input PRF", INDOCRYPT 2012.
constexpr std::uint64_t sip_hash(SipKey key, std::string_view message) {
  std::uint64_t v0 = key.low ^ 0x736f6d6570736575u;
  std::uint64_t v1 = key.high ^ 0x646f72616e646f6du;
  std::uint64_t v2 = key.low ^ 0x6c7967656e657261u;
  std::uint64_t v3 = key.high ^ 0x7465646279746573u;
  const auto rounds = [&](int n) {
    while (n-- > 0) {
      v0 += v1;
      v2 += v3;
      v1 = std::rotl(v1, 13) ^ v0;
      v3 = std::rotl(v3, 16) ^ v2;
      v0 = std::rotl(v0, 32);
      v2 += v1;
      v0 += v3;
      v1 = std::rotl(v1, 17) ^ v2;
      v3 = std::rotl(v3, 21) ^ v0;
      v2 = std::rotl(v2, 32);
    }
  };
  const auto absorb = [&](std::uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  };
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < message.size(); ++i) {
    word |= static_cast<std::uint64_t>(static_cast<unsigned char>(message[i])) << (8 * (i % 8));
    if (i % 8 == 7) {
      absorb(word);
      word = 0;
    }
  }
  absorb(word | static_cast<std::uint64_t>(message.size()) << 56);
  v2 ^= 0xff;
  rounds(4);
  return v0 ^ v1 ^ v2 ^ v3;
}

/// Derives a key from a secret of any length. It is as hard to guess as the secret.
constexpr SipKey derive_key(std::string_view secret) {
  return {sip_hash({0, 0}, secret), sip_hash({1, 0}, secret)};
}

}  // namespace lockstep::detail
