// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file LibTorch modules on GPUs. Compile with nvcc, which the jobs' own kernels need (`-std=c++20
/// --extended-lambda --expt-relaxed-constexpr`), with the CUDA that LibTorch was built for, and
/// link libtorch_cuda and libc10_cuda besides the libraries of the CPU. Modules, data and whatever
/// else uses LibTorch may stay in files for the host's compiler: `torch.hpp` is enough there.

#include "lockstep/lockstep.cuh"
#include "lockstep/torch.hpp"
#include "lockstep/torch/cuda/batch.cuh"
#include "lockstep/torch/cuda/capture.cuh"
#include "lockstep/torch/cuda/loop_streams.cuh"
#include "lockstep/torch/cuda/step_tensors.cuh"
