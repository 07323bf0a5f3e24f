// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Every macro of the library.

/// Marks functions that host and device code share; empty for a plain host compiler.
#if defined(__CUDACC__)
#define LOCKSTEP_HOST_DEVICE __host__ __device__
#else
#define LOCKSTEP_HOST_DEVICE
#endif

/// Marks a kernel, hidden: two libraries that include lockstep must not call each other's stubs.
#define LOCKSTEP_KERNEL __attribute__((visibility("hidden"))) __global__ void

/// Marks a definition of an `.ipp` file, which headers include unless LOCKSTEP_COMPILED is defined.
#if defined(LOCKSTEP_COMPILED)
#include "lockstep/detail/core/library.hpp"
#define LOCKSTEP_INLINE
#else
#define LOCKSTEP_INLINE inline
#endif

/// Enclose rare code, which g++ does not optimise: that would dominate a program's compile time.
/// The checks of _FORTIFY_SOURCE, a default of Ubuntu's g++, compile with optimisation only.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__) && \
    !defined(LOCKSTEP_LIBRARY) && !defined(_FORTIFY_SOURCE)
#define LOCKSTEP_COLD_BEGIN _Pragma("GCC push_options") _Pragma("GCC optimize(\"O0\")")
#define LOCKSTEP_COLD_END _Pragma("GCC pop_options")
#else
#define LOCKSTEP_COLD_BEGIN
#define LOCKSTEP_COLD_END
#endif
