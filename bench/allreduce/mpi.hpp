// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file All-reduces through MPI, on ranks that mpirun starts: Backend<Mpi> beside MPI_Allreduce
/// and Gloo.

#include <array>
#include <cstddef>

#include "report.hpp"

namespace bench {

/// Races `ranks` ranks; unknown times where MPI is not installed.
std::array<MpiRow, sizes.size()> race_through_mpi(std::size_t ranks);

/// The part of a rank that mpirun has started.
void run_mpi_rank(const char* file);

}  // namespace bench
