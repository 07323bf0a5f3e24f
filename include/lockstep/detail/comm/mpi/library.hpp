// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file MPI's C interface, as system headers wherever they are found: their warnings are not ours.
#pragma GCC system_header

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif
