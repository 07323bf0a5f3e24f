// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The results of all races, as tables and as JSON.

#include <array>
#include <cstddef>
#include <filesystem>

#include "lockstep/detail/core/bytes.hpp"
#include "measure.hpp"

namespace bench {

using namespace lockstep::literals;

inline constexpr std::array<std::size_t, 3> worlds = {2, 4, 8};
inline constexpr std::array<std::size_t, 7> sizes = {1_KiB, 16_KiB, 256_KiB, 1_MiB,
                                                     4_MiB, 25_MiB, 64_MiB};

enum Lane : std::size_t { arena, staged, plain, gloo, copying, lanes };

using Row = std::array<Times, lanes>;

/// Lies in shared memory: rank 0 of each world writes its part.
struct Results {
  std::array<std::array<Row, sizes.size()>, worlds.size()> rows;
  Times checked;  // 1 MiB, two ranks
  Times unchecked;
};

void print_row(std::size_t ranks, std::size_t bytes, const Row& row);
void print_heading();

/// Prints the targets and writes every row. A missed target is a result, not an error.
void report(const Results& results, const std::filesystem::path& file);

}  // namespace bench
