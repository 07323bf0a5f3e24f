// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The streams on which the ranks of one process communicate, one on each of their GPUs,
/// ordered with their compute streams by events; whether these GPUs may use each other's memory,
/// which is asked, opened and tried once for each pair, when the first ranks that need it join; and
/// the kernel that moves bytes between them.

#include <cuda_runtime.h>
#include <cuda_runtime_api.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/threads/meeting.hpp"
#include "lockstep/comm/combine.cuh"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/runtime.cuh"
#include "lockstep/device/cuda/vector.cuh"

namespace lockstep::detail::threads {

/// The most ranks that one process can have: a kernel's argument holds two pointers for each.
inline constexpr std::size_t most_ranks = 128;

/// Every rank's memory by a pointer. `Ranks` where the compiler knows it, else up to `most_ranks`.
template <class T, std::size_t Ranks>
struct RankPointers {
  static constexpr std::size_t static_ranks = Ranks;
  static constexpr std::size_t capacity = Ranks == dynamic ? most_ranks : Ranks;
  const T* at[capacity];
  __device__ const T* operator()(unsigned w) const { return at[w]; }
};

/// For source s and target t, the bytes at in[s] + t * in_stride go to out[t] + s * out_stride.
struct Movement {
  const unsigned char* in[most_ranks];
  unsigned char* out[most_ranks];
  PacketPass pass;
  std::size_t in_stride;
  std::size_t out_stride;
  unsigned targets;
};

/// `Dealt`: every target gets its own piece of a source. Otherwise all get the same, which is
/// loaded once.
template <bool Dealt>
LOCKSTEP_KERNEL __launch_bounds__(PacketPass::threads)
    move_bytes(const __grid_constant__ Movement work) {
  const unsigned source = blockIdx.y;
  work.pass.template sweep<16>([&]<std::size_t N>(std::size_t i) {
    const unsigned char* const from = work.in[source] + i;
    const std::size_t to = source * work.out_stride + i;
    Packet<unsigned char, N> packet;
    if constexpr (!Dealt) packet = load_some<N>(from);
    for (unsigned t = 0; t < work.targets; ++t) {
      if constexpr (Dealt) packet = load_some<N>(from + t * work.in_stride);
      store_some<N>(work.out[t] + to, packet);
    }
  });
}

/// `LOCKSTEP_PEER_ACCESS=0` makes ranks exchange everything through host memory.
inline bool wants_peer_access() {
  const char* const text = std::getenv("LOCKSTEP_PEER_ACCESS");
  return text == nullptr || std::string_view(text) != "0";
}

/// The pools that `cudaMallocAsync` takes a device's memory from: the default one, and the one that
/// the program has made current.
inline std::vector<cudaMemPool_t> usual_pools(int device) {
  int supported = 0;
  check_cuda(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, device),
             "cudaDeviceGetAttribute");
  if (supported == 0) return {};
  cudaMemPool_t pools[2] = {};
  check_cuda(cudaDeviceGetDefaultMemPool(&pools[0], device), "cudaDeviceGetDefaultMemPool");
  check_cuda(cudaDeviceGetMemPool(&pools[1], device), "cudaDeviceGetMemPool");
  if (pools[0] == pools[1]) return {pools[0]};
  return {pools[0], pools[1]};
}

/// Tries what ranks do with a peer's memory: copies are made, and kernels store to it and load from
/// it, both ways. An IOMMU that translates the traffic between two PCIe devices can make all of
/// that end without an error and with other bytes. **Host** blocks.
inline bool bytes_arrive(int a, int b) {
  constexpr std::size_t bytes = 16 * 1024;  // some pages
  const std::size_t gpus[] = {static_cast<std::size_t>(a), static_cast<std::size_t>(b)};
  std::vector<DeviceArena> memory;
  for (const std::size_t gpu : gpus) {
    const OnGpu current(gpu);
    memory.emplace_back(bytes);
  }
  std::vector<std::uint64_t> sent(bytes / sizeof(std::uint64_t));
  std::vector<std::uint64_t> arrived(sent.size());
  std::uint64_t word = 0;
  const auto arrives = [&](const CudaStream& stream, std::size_t from, bool by_kernel) {
    for (std::uint64_t& one : sent) one = word += 0x9e3779b97f4a7c15u;  // never the same bytes
    copy_now(memory[from].data(), sent.data(), bytes);
    std::byte* const source = memory[from].data();
    std::byte* const target = memory[1 - from].data();
    if (by_kernel) {
      Movement work{};
      work.in[0] = reinterpret_cast<const unsigned char*>(source);
      work.out[0] = reinterpret_cast<unsigned char*>(target);
      work.pass = PacketPass::cut<unsigned char>(bytes, 0);
      work.targets = 1;
      launch_kernel<move_bytes<false>>("move_bytes", stream, work.pass.grid<unsigned char>(8),
                                       PacketPass::threads, work);
    } else {
      check_cuda(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, stream),
                 "cudaMemcpyAsync");
    }
    stream.synchronize();
    copy_now(arrived.data(), target, bytes);
    return arrived == sent;
  };
  for (const std::size_t worker : {0, 1}) {  // works on its own memory and on the other's
    const OnGpu current(gpus[worker]);
    const CudaStream stream;
    for (const bool by_kernel : {false, true})
      if (!arrives(stream, worker, by_kernel) || !arrives(stream, 1 - worker, by_kernel))
        return false;
  }
  return true;
}

/// Opens one way between two devices. Empty, or why that cannot be. Sets `is_new` if it was not
/// open.
inline std::string enable_peer(int own, int peer, bool& is_new) {
  int possible = 0;
  check_cuda(cudaDeviceCanAccessPeer(&possible, own, peer), "cudaDeviceCanAccessPeer");
  if (possible == 0) {
    return text({"GPU ", own, " cannot access the memory of GPU ", peer,
                 ". NVLink or a common PCIe switch makes that possible (nvidia-smi topo -m)"});
  }
  const OnGpu current(static_cast<std::size_t>(own));
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaSuccess) {
    is_new = true;
    return {};
  }
  static_cast<void>(cudaGetLastError());
  if (error == cudaErrorPeerAccessAlreadyEnabled) return {};
  return text({"GPU ", own, " may not access the memory of GPU ", peer, " (",
               cudaGetErrorName(error), "). Without NVSwitch a GPU has at most eight peers"});
}

/// Opens both ways between two devices. Empty, or why that cannot be. A pair that was open before
/// is tried again if somebody has closed it meanwhile (`cudaDeviceReset`).
inline std::string open_peers(int a, int b, bool is_new) {
  const std::pair<int, int> ways[] = {{a, b}, {b, a}};
  for (const auto& [own, peer] : ways) {
    if (std::string refusal = enable_peer(own, peer, is_new); !refusal.empty()) return refusal;
  }
  if (!is_new) return {};
  const bool works = bytes_arrive(a, b);
  for (const auto& [own, peer] : ways) {
    const OnGpu current(static_cast<std::size_t>(own));
    if (!works) {  // so that copies go through the host as well, where the direct way is wrong
      if (cudaDeviceDisablePeerAccess(peer) != cudaSuccess) static_cast<void>(cudaGetLastError());
      continue;
    }
    // Peer access does not hold for memory of `cudaMallocAsync`, which its pool grants. If it does
    // not, calls with such memory are refused.
    cudaMemAccessDesc access{};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = peer;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    for (cudaMemPool_t pool : usual_pools(own)) {
      if (cudaMemPoolSetAccess(pool, &access, 1) != cudaSuccess)
        static_cast<void>(cudaGetLastError());
    }
  }
  if (works) return {};
  return text({"GPUs ", a, " and ", b,
               " do not get each other's bytes right: an IOMMU or PCIe's access control (ACS) "
               "stands between them. Turn these off (in the BIOS, or the kernel's iommu=pt)"});
}

/// What is known of the pairs of devices of this process: empty, or why they do not use each
/// other's memory.
struct PeerAccess {
  std::mutex mutex;
  std::map<std::pair<int, int>, std::string> pairs;

  static PeerAccess& of_process() {
    static PeerAccess known;
    return known;
  }

  /// Why two devices do not use each other's memory; empty if they may. `is_new`: nobody was told
  /// yet. **Host** blocks, the first time for each pair.
  std::string obstacle(int a, int b, bool& is_new) {
    if (a == b) return {};
    const std::lock_guard lock(mutex);
    const auto [pair, is_first] = pairs.try_emplace(std::minmax(a, b));
    is_new = is_first;
    if (is_first || pair->second.empty()) pair->second = open_peers(a, b, is_first);
    return pair->second;
  }
};

/// The most bytes of one rank that are under way through host memory at a time.
inline constexpr std::size_t most_staged_bytes = std::size_t{4} << 20;

/// Pinned memory, which every GPU can access. It is allocated when ranks join: allocating in a call
/// may wait for GPUs that wait for this call.
class Staging {
 public:
  /// Up to `most` bytes for each rank's part of a collective, and as much for a result; about 64
  /// MiB for many ranks.
  Staging(std::size_t ranks, std::size_t most) : bytes_(slot_bytes(ranks, most)), ranks_(ranks) {}

  /// Of a slot. It is divided evenly among all ranks in whole packets.
  std::size_t bytes() const { return bytes_; }

  unsigned char* of(std::size_t rank) const {
    return reinterpret_cast<unsigned char*>(memory_.data()) + rank * bytes_;
  }
  unsigned char* result() const { return of(ranks_); }

 private:
  static std::size_t slot_bytes(std::size_t ranks, std::size_t most) {
    const std::size_t least = ranks * 256;
    const std::size_t wanted =
        std::clamp((std::size_t{64} << 20) / ranks, least, std::max(most, least));
    return wanted / least * least;
  }

  std::size_t bytes_;
  std::size_t ranks_;
  PinnedArena memory_{(ranks_ + 1) * bytes_};
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
    for (int i = 0; i < 2; ++i) hubs_.emplace_back(lanes_.front().gpu);
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
    for (const Offer& rank : ranks) wait_for(rank, hubs_[0].stream);
    release_lanes();
    stages();
    await_lanes(hubs_[1].stream);
    ended_[ticket % ring].record(hubs_[1].stream);
  }
  template <class F>
  void each(const F& f) const {
    for (const Lane& lane : lanes_) {
      const OnGpu current(lane.gpu);
      f(lane);
    }
  }
  /// Calls `f(rank)` for the ranks on a lane's GPU.
  template <class F>
  void for_ranks_on(const Lane& lane, const F& f) const {
    for (std::size_t w = 0; w < lane_of_rank_.size(); ++w) {
      if (&lane == &of(Rank{w})) f(w);
    }
  }
  /// Calls `f(lane, rank)` for all ranks, lane by lane.
  template <class F>
  void each_rank(const F& f) const {
    each([&](const Lane& lane) { for_ranks_on(lane, [&](std::size_t w) { f(lane, w); }); });
  }
  /// **Stream** the next work of every lane comes after what all lanes hold.
  void meet() const {
    await_lanes(hubs_[0].stream);
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
    for (const std::vector<Lane>* lanes : {&lanes_, &hubs_}) {
      for (const Lane& lane : *lanes) f(lane.stream.get(), lane.reached.get());
    }
  }

 private:
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
    hubs_[0].reached.record(hubs_[0].stream);
    for (const Lane& lane : lanes_) hubs_[0].reached.block(lane.stream);
  }

  /// Can all GPUs use each other's memory? If not, it is said once, with the first reason.
  bool open_ways() const {
    if (!wants_peer_access()) return false;
    std::string reason;
    std::size_t told = 0;
    bool is_open = true;
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      for (std::size_t j = i + 1; j < lanes_.size(); ++j) {
        bool is_new = false;
        const std::string obstacle = PeerAccess::of_process().obstacle(
            device_of(lanes_[i].gpu), device_of(lanes_[j].gpu), is_new);
        if (obstacle.empty()) continue;
        is_open = false;
        if (is_new && told++ == 0) reason = obstacle;
      }
    }
    if (told == 0) return is_open;
    const std::string others = told == 1 ? "" : text({" (as in ", told - 1, " other pairs)"});
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
  /// Where there are several lanes: the streams in which the events of ranks and of lanes are
  /// collected before and after a call, on the first lane's GPU.
  std::vector<Lane> hubs_;
  std::optional<Staging> staging_;
};

}  // namespace lockstep::detail::threads
