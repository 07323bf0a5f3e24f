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
