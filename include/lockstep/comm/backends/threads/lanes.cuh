// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The streams on which the ranks of one process communicate, one on each of their GPUs,
/// ordered with their compute streams by events.

#include <cuda_runtime_api.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/backends/threads/meeting.hpp"
#include "lockstep/comm/backends/threads/peer_access.cuh"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/stream.cuh"

namespace lockstep::detail::threads {

/// The most bytes of one rank that are under way through host memory at a time.
inline constexpr std::size_t most_staged_bytes = std::size_t{4} << 20;

/// Pinned memory, which every GPU can access. It is allocated when ranks join: allocating in a call
/// may wait for GPUs that wait for this call.
class Staging {
 public:
  /// Up to `most` bytes for each rank's part of a collective, as much for a result, and as much
  /// again for each rank's message; about 64 MiB of each for many ranks.
  Staging(std::size_t ranks, std::size_t most)
      : bytes_(std::clamp((std::size_t{64} << 20) / ranks, least(ranks),
                          std::max(most, least(ranks))) /
               least(ranks) * least(ranks)),
        ranks_(ranks),
        memory_((2 * ranks + 1) * bytes_) {}

  /// Of a slot. It is divided evenly among all ranks in whole packets.
  std::size_t bytes() const { return bytes_; }

  unsigned char* of(std::size_t rank) const { return slot(rank); }
  unsigned char* result() const { return slot(ranks_); }
  unsigned char* message_of(std::size_t rank) const { return slot(ranks_ + 1 + rank); }

 private:
  static std::size_t least(std::size_t ranks) { return ranks * 256; }
  unsigned char* slot(std::size_t number) const {
    return reinterpret_cast<unsigned char*>(memory_.data()) + number * bytes_;
  }

  std::size_t bytes_;
  std::size_t ranks_;
  PinnedArena memory_;
};

/// One GPU's part of the communication.
struct Lane {
  /// Makes a lane on the current GPU.
  explicit Lane(std::size_t gpu) : gpu(gpu), stream(CudaStream::urgent()) {
    check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device_of(gpu)),
               "cudaDeviceGetAttribute");
  }

  std::size_t gpu;
  CudaStream stream;
  CudaEvent reached;  // a point that other lanes wait for
  int processors = 0;
  std::size_t ranks = 0;  // on this GPU
  bool is_only = true;    // all ranks are
};

/// All lanes of a world. One rank at a time enqueues work.
class Lanes {
 public:
  /// One lane for each GPU that ranks use; `gpus[r]` is rank r's. `most_staged`: see `Staging`.
  explicit Lanes(const std::vector<std::size_t>& gpus,
                 std::size_t most_staged = most_staged_bytes) {
    for (std::size_t gpu : gpus) {
      lane_of_rank_.push_back(find(gpu));
      if (lane_of_rank_.back() == lanes_.size()) {
        const OnGpu current(gpu);
        lanes_.emplace_back(gpu);
      }
      ++lanes_[lane_of_rank_.back()].ranks;
    }
    for (Lane& lane : lanes_) lane.is_only = is_one();
    const OnGpu current(lanes_.front().gpu);
    ended_ = std::vector<CudaEvent>(ring);
    if (is_one()) return;
    hub_.emplace();
    if (!open_ways()) staging_.emplace(gpus.size(), most_staged);
  }

  std::span<const Lane> all() const { return lanes_; }
  const Lane& of(Rank rank) const { return lanes_[lane_of_rank_[rank.value()]]; }
  bool is_one() const { return lanes_.size() == 1; }
  /// Where GPUs cannot use each other's memory; null where they can, or where there is one.
  const Staging* staging() const { return staging_ ? &*staging_ : nullptr; }

  /// Calls `enqueue(lane)` for each lane, which puts the lane's work for a call on its stream.
  /// **Stream** it comes after what all ranks' compute streams held when they announced the call.
  template <class Enqueue>
  void run(std::span<const Offer> ranks, std::uint64_t ticket, const Enqueue& enqueue) const {
    if (!is_one()) return run_in_stages(ranks, ticket, [&] { each(enqueue); });
    const Lane& lane = lanes_.front();
    const OnGpu current(lane.gpu);
    for (const Offer& rank : ranks) wait_for(rank, lane.stream);
    enqueue(lane);
    ended_[ticket % ring].record(lane.stream);
  }

  /// Calls `enqueue(lane)` for the first lane, whose work is that of all: it comes after what all
  /// lanes hold, because it may use the memory that they share.
  template <class Enqueue>
  void run_on_first(std::span<const Offer> ranks, std::uint64_t ticket,
                    const Enqueue& enqueue) const {
    if (is_one()) return run(ranks, ticket, enqueue);
    run_in_stages(ranks, ticket, [&] {
      meet();
      const OnGpu current(lanes_.front().gpu);
      enqueue(lanes_.front());
    });
  }

  /// As `run`, of several lanes: `stages()` calls `each` and `meet`.
  ///
  /// Every lane comes after every rank, and every rank after every lane, through one event in each
  /// direction: the calls of CUDA are as many as ranks and lanes together, not as their product.
  /// The two streams that collect events do no work, so that a lane begins with the next call
  /// while others are still busy with this one.
  template <class Stages>
  void run_in_stages(std::span<const Offer> ranks, std::uint64_t ticket,
                     const Stages& stages) const {
    for (const Offer& rank : ranks) wait_for(rank, hub_->opening);
    release_lanes();
    stages();
    await_lanes(hub_->closing);
    ended_[ticket % ring].record(hub_->closing);
  }
  template <class F>
  void each(const F& f) const {
    for (const Lane& lane : lanes_) {
      const OnGpu current(lane.gpu);
      f(lane);
    }
  }
  /// **Stream** the next work of every lane comes after what all lanes hold.
  void meet() const {
    await_lanes(hub_->opening);
    release_lanes();
  }

  /// Makes `stream` wait for the call.
  void block(cudaStream_t stream, std::uint64_t ticket) const {
    ended_[ticket % ring].block(stream);
  }
  bool test(std::uint64_t ticket) const { return ended_[ticket % ring].test(); }

  /// Calls `f(stream, event)` with every stream that communicates, and an event of its GPU.
  template <class F>
  void for_each_stream(const F& f) const {
    for (const Lane& lane : lanes_) f(lane.stream.get(), lane.reached.get());
    if (!hub_) return;
    f(hub_->opening.get(), hub_->begun.get());
    f(hub_->closing.get(), hub_->begun.get());
  }

 private:
  /// Where the events of ranks and lanes are collected, on the first lane's GPU.
  struct Hub {
    CudaStream opening = CudaStream::urgent();
    CudaStream closing = CudaStream::urgent();
    CudaEvent begun;
  };

  std::size_t find(std::size_t gpu) const {
    std::size_t i = 0;
    while (i < lanes_.size() && lanes_[i].gpu != gpu) ++i;
    return i;
  }

  static void wait_for(const Offer& rank, cudaStream_t stream) {
    check_cuda(cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(rank.event), 0),
               "cudaStreamWaitEvent");
  }
  void await_lanes(cudaStream_t stream) const {
    for (const Lane& lane : lanes_) {
      lane.reached.record(lane.stream);
      lane.reached.block(stream);
    }
  }
  void release_lanes() const {
    hub_->begun.record(hub_->opening);
    for (const Lane& lane : lanes_) hub_->begun.block(lane.stream);
  }

  /// Can all GPUs use each other's memory? If not, it is said once, with the first reason.
  bool open_ways() const {
    if (!wants_peer_access()) return false;
    std::string reason;
    std::size_t more = 0;
    bool is_open = true;
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      for (std::size_t j = i + 1; j < lanes_.size(); ++j) {
        const auto obstacle =
            PeerAccess::between(device_of(lanes_[i].gpu), device_of(lanes_[j].gpu));
        if (!obstacle) continue;
        is_open = false;
        if (!obstacle->is_new) continue;
        if (reason.empty()) {
          reason = obstacle->text;
        } else {
          ++more;
        }
      }
    }
    if (reason.empty()) return is_open;
    const std::string others = more == 0 ? "" : text({" (as in ", more, " other pairs)"});
    std::fputs(text({"lockstep: ", reason, others,
                     ". Until then ranks exchange everything through host memory, which is slower; "
                     "LOCKSTEP_PEER_ACCESS=0 says that you know\n"})
                   .c_str(),
               stderr);
    return false;
  }

  std::vector<Lane> lanes_;
  std::vector<std::size_t> lane_of_rank_;
  std::vector<CudaEvent> ended_;  // one for each call that may be under way
  std::optional<Hub> hub_;        // where there are several lanes
  std::optional<Staging> staging_;
};

}  // namespace lockstep::detail::threads
