// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The MLP's step on two ranks that mpirun starts: through MPI, through Gloo, and by hand
/// with MPI_Allreduce.

#include <array>
#include <cstddef>

#include "measure.hpp"

namespace bench {

enum MpiWay : std::size_t { over_mpi, without_thread, over_gloo, by_hand, mpi_ways };

/// Unknown times where MPI is not installed.
std::array<Times, mpi_ways> race_through_mpi();

/// The part of a rank that mpirun has started.
void run_mpi_rank(const char* file);

}  // namespace bench
