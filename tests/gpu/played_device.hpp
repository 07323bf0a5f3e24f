// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What CUDA says of itself where the host plays it: one device, and no errors. To be
/// included by one file of a program.

#include <cuda_runtime_api.h>

extern "C" {
const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* a, int* b) { return *a = *b = 0, cudaSuccess; }
}
