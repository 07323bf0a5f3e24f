// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The key of a record by number: eight bytes, big-endian, so that keys sort as numbers do.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace lockstep::detail {

struct LmdbKey {
  explicit LmdbKey(std::uint64_t number) {
    for (std::size_t i = 0; i != bytes.size(); ++i)
      bytes[i] = static_cast<unsigned char>(number >> (56 - 8 * i));
  }

  std::string_view text() const {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  std::array<unsigned char, 8> bytes{};
};

}  // namespace lockstep::detail
