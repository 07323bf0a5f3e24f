// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file SHA-256 (FIPS 180-4): reference figures give long lists of indices as their hash.

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

namespace sha256_detail {

/// The first 32 bits of the fractional part of the k-th root of the first primes.
template <std::size_t Count>
std::array<std::uint32_t, Count> root_fractions(long double (*root)(long double)) {
  std::array<std::uint32_t, Count> out{};
  std::size_t found = 0;
  for (unsigned n = 2; found < Count; ++n) {
    bool prime = true;
    for (unsigned d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
    if (!prime) continue;
    const long double r = root(static_cast<long double>(n));
    out[found++] = static_cast<std::uint32_t>((r - std::floor(r)) * 4294967296.0L);
  }
  return out;
}

}  // namespace sha256_detail

inline std::string sha256(std::string text) {
  static const auto k =
      sha256_detail::root_fractions<64>([](long double x) { return std::cbrt(x); });
  auto h = sha256_detail::root_fractions<8>([](long double x) { return std::sqrt(x); });
  const std::uint64_t bits = text.size() * 8;
  text += '\x80';
  while (text.size() % 64 != 56) text += '\0';
  for (int shift = 56; shift >= 0; shift -= 8) text += static_cast<char>(bits >> shift);
  for (std::size_t block = 0; block < text.size(); block += 64) {
    std::array<std::uint32_t, 64> w{};
    for (std::size_t i = 0; i < 64; ++i)
      w[i / 4] = w[i / 4] << 8 | static_cast<unsigned char>(text[block + i]);
    for (std::size_t i = 16; i < 64; ++i) {
      const auto a = w[i - 15];
      const auto b = w[i - 2];
      w[i] = w[i - 16] + w[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) +
             (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
    }
    auto v = h;
    for (std::size_t i = 0; i < 64; ++i) {
      const auto e = v[4];
      const auto a = v[0];
      const auto t1 = v[7] + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                      ((e & v[5]) ^ (~e & v[6])) + k[i] + w[i];
      const auto t2 = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) +
                      ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
      v = {t1 + t2, v[0], v[1], v[2], v[3] + t1, v[4], v[5], v[6]};
    }
    for (std::size_t i = 0; i < 8; ++i) h[i] += v[i];
  }
  std::string hex;
  for (std::uint32_t word : h)
    for (int shift = 28; shift >= 0; shift -= 4) hex += "0123456789abcdef"[word >> shift & 15];
  return hex;
}
