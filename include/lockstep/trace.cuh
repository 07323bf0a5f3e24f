// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Observers<Trace, GpuTrace>`: what the phases of steps take on the GPU, in the same trace.

#include "lockstep/detail/observe/gpu_trace.cuh"
#include "lockstep/trace.hpp"
