// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Joining an NCCL communicator: its arguments, ranks that share a GPU, and errors of
/// NCCL in words.

#include <nccl.h>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>

#include "lockstep/comm/rank_gpu.cuh"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/launch/host.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/launch/store.hpp"

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

namespace lockstep::detail::nccl {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

/// Groups share all but the first three.
struct JoinOptions {
  Rank rank;
  WorldSize world;
  std::string name;  // the communicator's, the same on all its ranks
  std::shared_ptr<Gpu> gpu;
  std::shared_ptr<Store> store;
  Milliseconds timeout;
};

/// Compares the ranks' GPUs before NCCL's first call. NCCL refuses two ranks that are on one GPU of
/// one host, but not of two hosts. So the environment tells NCCL that each such rank is on a host
/// of its own, and ranks talk through sockets, which is slow but good enough to try things out.
/// Ranks with GPUs of their own pretend nothing. **Ranks** all. **Host** blocks until all have
/// come.
inline void settle_hosts(const Membership& member, Store& store, const Gpu& gpu,
                         const std::string& name) {
  const GpuVerdict verdict = compare_gpus(member, store, gpu, "nccl/" + name);
  if (!verdict.has_neighbour(member.rank)) return;
  if (verdict.is_one_host()) SharedGpuVariables::use_loopback();
  if (SharedGpuVariables::use_own_host()) return;
  throw Error(
      "Backend<Nccl>", "ranks share a GPU, which NCCL takes for a mistake",
      "start them with lockstep's launcher and LOCKSTEP_SHARE_GPUS=1, or set NCCL_HOSTID to "
      "another word for every rank before it starts",
      member.rank);
}

}  // namespace lockstep::detail::nccl
