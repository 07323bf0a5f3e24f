// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The streams on which the ranks of one process communicate, one on each of their GPUs,
/// ordered with their compute streams by events.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/threads/meeting.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/on_gpu.cuh"
#include "lockstep/device/cuda/stream.cuh"

namespace lockstep::detail::threads {

/// One GPU's part of the communication.
struct Lane {
  /// Makes a lane on the current GPU.
  explicit Lane(std::size_t gpu) : gpu(gpu), stream(CudaStream::urgent()), done(ring) {
    check_cuda(
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, static_cast<int>(gpu)),
        "cudaDeviceGetAttribute");
  }

  std::size_t gpu;
  CudaStream stream;
  std::vector<CudaEvent> done;  // one for each call that may be under way
  int processors = 0;
};

class Lanes {
 public:
  /// One lane for each GPU that ranks use; `gpus[r]` is rank r's.
  explicit Lanes(const std::vector<std::size_t>& gpus) {
    for (std::size_t gpu : gpus) {
      lane_of_rank_.push_back(find(gpu));
      if (lane_of_rank_.back() < lanes_.size()) continue;
      const OnGpu current(gpu);
      lanes_.emplace_back(gpu);
    }
    for (const Lane& lane : lanes_) {
      for (const Lane& peer : lanes_) {
        if (lane.gpu != peer.gpu) let_access(lane.gpu, peer.gpu);
      }
    }
  }

  std::span<const Lane> all() const { return lanes_; }
  const Lane& of(Rank rank) const { return lanes_[lane_of_rank_[rank.value()]]; }
  bool is_one() const { return lanes_.size() == 1; }

  /// Calls `enqueue(lane)` for each lane, which puts the lane's work for a call on its stream.
  /// **Stream** it comes after what all ranks' compute streams held when they announced the call.
  template <class Enqueue>
  void run(std::span<const Offer> ranks, std::uint64_t ticket, const Enqueue& enqueue) const {
    for (const Lane& lane : lanes_) {
      const OnGpu current(lane.gpu);
      for (const Offer& rank : ranks) {
        check_cuda(cudaStreamWaitEvent(lane.stream, static_cast<cudaEvent_t>(rank.event), 0),
                   "cudaStreamWaitEvent");
      }
      enqueue(lane);
      lane.done[ticket % ring].record(lane.stream);
    }
  }

  /// Makes `stream` wait for the call.
  void block(cudaStream_t stream, std::uint64_t ticket) const {
    for (const Lane& lane : lanes_) lane.done[ticket % ring].block(stream);
  }
  bool test(std::uint64_t ticket) const {
    for (const Lane& lane : lanes_) {
      if (!lane.done[ticket % ring].test()) return false;
    }
    return true;
  }

 private:
  std::size_t find(std::size_t gpu) const {
    std::size_t i = 0;
    while (i < lanes_.size() && lanes_[i].gpu != gpu) ++i;
    return i;
  }

  static void let_access(std::size_t gpu, std::size_t peer) {
    int possible = 0;
    check_cuda(cudaDeviceCanAccessPeer(&possible, static_cast<int>(gpu), static_cast<int>(peer)),
               "cudaDeviceCanAccessPeer");
    if (possible == 0) {
      throw Error(
          "Backend<Shm>",
          "GPU " + std::to_string(gpu) + " cannot access the memory of GPU " + std::to_string(peer),
          "use GPUs that are connected by NVLink or one PCIe switch (nvidia-smi topo -m), "
          "or Backend<Nccl>",
          rank_of_thread());
    }
    const OnGpu current(gpu);
    const cudaError_t error = cudaDeviceEnablePeerAccess(static_cast<int>(peer), 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      static_cast<void>(cudaGetLastError());
    } else {
      check_cuda(error, "cudaDeviceEnablePeerAccess");
    }
  }

  std::vector<Lane> lanes_;
  std::vector<std::size_t> lane_of_rank_;
};

}  // namespace lockstep::detail::threads
