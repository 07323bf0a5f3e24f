// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Lets NCCL join ranks that have one GPU.

#include <cstdlib>

#include "lockstep/comm/rank_gpu.cuh"
#include "lockstep/core/error.hpp"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/shared_gpus.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep::detail::nccl {

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
