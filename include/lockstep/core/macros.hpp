// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Every macro of the library: what C++ cannot say, and nothing else.

/// Marks arithmetic that host and device code share; a plain host compiler sees nothing.
#if defined(__CUDACC__)
#define LOCKSTEP_HOST_DEVICE __host__ __device__
#else
#define LOCKSTEP_HOST_DEVICE
#endif

/// Marks a kernel. Its symbol is hidden, because two libraries of one program may both include
/// lockstep and must not call each other's host stubs.
#define LOCKSTEP_KERNEL __attribute__((visibility("hidden"))) __global__ void

/// Marks a definition in an `.ipp` file. Headers include these files, so that a program needs no
/// library; where LOCKSTEP_COMPILED is defined they do not, and the program links the library that
/// `compiled.cpp` makes of them.
#if defined(LOCKSTEP_COMPILED)
#include "lockstep/core/library.hpp"
#define LOCKSTEP_INLINE
#else
#define LOCKSTEP_INLINE inline
#endif

/// The code between these two runs once or seldom, when ranks start, print or fail. g++ compiles it
/// as it stands: optimised it would be most of what a program waits for at its compilation. The
/// compiled library is optimised.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__) && !defined(LOCKSTEP_LIBRARY)
#define LOCKSTEP_COLD_BEGIN _Pragma("GCC push_options") _Pragma("GCC optimize(\"O0\")")
#define LOCKSTEP_COLD_END _Pragma("GCC pop_options")
#else
#define LOCKSTEP_COLD_BEGIN
#define LOCKSTEP_COLD_END
#endif
