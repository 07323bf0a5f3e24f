// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file LibTorch modules on GPUs. Compile with nvcc
/// (`-std=c++20 --extended-lambda --expt-relaxed-constexpr`) and the CUDA that LibTorch was built
/// for, and link libtorch_cuda and libc10_cuda too. For files without jobs, `torch.hpp` is enough.

#include "lockstep/detail/torch/cuda/batch.cuh"
#include "lockstep/detail/torch/cuda/capture.cuh"
#include "lockstep/detail/torch/cuda/cross_entropy.cuh"
#include "lockstep/detail/torch/cuda/loop_streams.cuh"
#include "lockstep/detail/torch/cuda/step_tensors.cuh"
#include "lockstep/lockstep.cuh"
#include "lockstep/torch.hpp"
