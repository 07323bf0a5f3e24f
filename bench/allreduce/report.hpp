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

enum MpiLane : std::size_t { mpi, mpi_any_order, plain_mpi, gloo_beside_mpi, mpi_lanes };

using MpiRow = std::array<Times, mpi_lanes>;

inline constexpr std::array<std::size_t, 2> mpi_worlds = {2, 4};

/// By world and size; unknown where MPI is not installed.
using MpiResults = std::array<std::array<MpiRow, sizes.size()>, mpi_worlds.size()>;

/// Lies in shared memory: rank 0 of each world writes its part.
struct Results {
  std::array<std::array<Row, sizes.size()>, worlds.size()> rows;
  Times checked;  // 1 MiB, two ranks
  Times unchecked;
};

void print_row(std::size_t ranks, std::size_t bytes, const Row& row);
void print_heading();

void print_mpi(const MpiResults& results);

/// Prints the targets and writes every row. A missed target is a result, not an error.
void report(const Results& results, const MpiResults& through_mpi,
            const std::filesystem::path& file);

}  // namespace bench
