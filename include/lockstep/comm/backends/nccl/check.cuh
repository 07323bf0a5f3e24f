// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Every NCCL call is checked here: what failed, on which rank, and what to do about it.

#include <nccl.h>

#include <string>

#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/check.cuh"

namespace lockstep::detail {

inline const char* nccl_advice(ncclResult_t result) {
  switch (result) {
    case ncclUnhandledCudaError:
      return "an earlier CUDA call failed, or the GPU's memory is used up: NCCL_DEBUG=INFO shows "
             "which";
    case ncclSystemError:
      return "NCCL_DEBUG=INFO shows which system call failed; for sockets NCCL_SOCKET_IFNAME "
             "chooses the network interface";
    case ncclInvalidUsage:
      return "NCCL wants one GPU per rank, the same version everywhere, and the same calls of all "
             "ranks";
    case ncclRemoteError:
      return "another rank ended, or the network failed: look at the other ranks first";
    default:
      return "NCCL_DEBUG=INFO shows more";
  }
}

/// NCCL's description of a failure: its code in words, and its last log message.
inline std::string nccl_words(ncclResult_t result) {
  std::string words = ncclGetErrorString(result);
  const std::string last = ncclGetLastError(nullptr);
  return last.empty() ? words : words + ", " + last;
}

/// The error of a call that failed. Where another rank is the cause, it is marked as a consequence.
inline Error nccl_error(ncclResult_t result, const std::string& operation) {
  Error error(operation, nccl_words(result), nccl_advice(result), rank_of_thread());
  return result == ncclRemoteError ? error.as_consequence() : error;
}

/// Throws unless an NCCL call succeeded, or is under way: `check_nccl(ncclCommInitRank(...),
/// "ncclCommInitRank")`.
inline void check_nccl(ncclResult_t result, const char* call) {
  if (result != ncclSuccess && result != ncclInProgress) [[unlikely]]
    throw nccl_error(result, call);
}

}  // namespace lockstep::detail
