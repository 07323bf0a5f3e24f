// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Kernels that read and write all ranks' memory, and whether the GPUs of a process may
/// use each other's. It is asked, opened and tried once for each pair of them, when the first
/// ranks that need it join.

#include <cuda_runtime.h>
#include <cuda_runtime_api.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/combine.cuh"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/launch.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/stream.cuh"
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
struct Move {
  const Movement& work;
  unsigned source;

  template <std::size_t N>
  __device__ void at(std::size_t i) const {
    const unsigned char* const from = work.in[source] + i;
    const std::size_t to = source * work.out_stride + i;
    Packet<unsigned char, N> packet;
    if constexpr (!Dealt) packet = load_some<N>(from);
    for (unsigned t = 0; t < work.targets; ++t) {
      if constexpr (Dealt) packet = load_some<N>(from + t * work.in_stride);
      store_some<N>(work.out[t] + to, packet);
    }
  }
};

template <bool Dealt>
LOCKSTEP_KERNEL __launch_bounds__(PacketPass::threads)
    move_bytes(const __grid_constant__ Movement work) {
  work.pass.template sweep<16>(Move<Dealt>{work, blockIdx.y});
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
/// it. An IOMMU that translates the traffic between two PCIe devices can make all of that end
/// without an error and with other bytes.
class PeerTrial {
 public:
  PeerTrial(int a, int b) : devices_{a, b}, memory_{memory_of(a), memory_of(b)} {}

  /// Do all bytes arrive, both ways? **Host** blocks.
  bool succeeds() const { return works_for(0) && works_for(1); }

 private:
  static constexpr std::size_t bytes = 16 * 1024;  // some pages

  static DeviceArena memory_of(int device) {
    const OnGpu current(static_cast<std::size_t>(device));
    return DeviceArena(bytes);
  }

  /// One device works on its own memory and on the other's.
  bool works_for(std::size_t worker) const {
    const OnGpu current(static_cast<std::size_t>(devices_[worker]));
    const CudaStream stream;
    const auto copy = [&](std::byte* to, const std::byte* from) {
      check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    };
    const auto move = [&](std::byte* to, const std::byte* from) {
      Movement work{};
      work.in[0] = reinterpret_cast<const unsigned char*>(from);
      work.out[0] = reinterpret_cast<unsigned char*>(to);
      work.pass = PacketPass::cut<unsigned char>(bytes, 0);
      work.targets = 1;
      launch_kernel<move_bytes<false>>("move_bytes", stream, work.pass.grid<unsigned char>(8),
                                       PacketPass::threads, work);
    };
    const std::size_t peer = 1 - worker;
    return arrives(stream, worker, peer, copy) && arrives(stream, peer, worker, copy) &&
           arrives(stream, worker, peer, move) && arrives(stream, peer, worker, move);
  }

  template <class Transfer>
  bool arrives(const CudaStream& stream, std::size_t from, std::size_t to,
               const Transfer& transfer) const {
    std::vector<std::uint64_t> sent(bytes / sizeof(std::uint64_t));
    for (std::uint64_t& word : sent) word = tried_ += 0x9e3779b97f4a7c15u;  // never the same bytes
    copy_now(memory_[from].data(), sent.data(), bytes);
    transfer(memory_[to].data(), memory_[from].data());
    stream.synchronize();
    std::vector<std::uint64_t> arrived(sent.size());
    copy_now(arrived.data(), memory_[to].data(), bytes);
    return arrived == sent;
  }

  int devices_[2];
  DeviceArena memory_[2];
  mutable std::uint64_t tried_ = 0;
};

/// What is known of the pairs of devices of this process.
class PeerAccess {
 public:
  /// Why two devices do not use each other's memory; nothing if they may. `is_new`: nobody was
  /// told yet. **Host** blocks, the first time for each pair.
  struct Obstacle {
    std::string text;
    bool is_new;
  };
  static std::optional<Obstacle> between(int a, int b) {
    if (a == b) return std::nullopt;
    const std::lock_guard lock(mutex());
    const auto [pair, is_new] = known().try_emplace(std::minmax(a, b));
    if (is_new || pair->second.empty()) pair->second = open(a, b, is_new);
    if (pair->second.empty()) return std::nullopt;
    return Obstacle{pair->second, is_new};
  }

  /// Pairs are tried again. For tests.
  static void forget() {
    const std::lock_guard lock(mutex());
    known().clear();
  }

 private:
  using Known = std::map<std::pair<int, int>, std::string>;
  static Known& known() {
    static Known known;
    return known;
  }
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }

  /// Opens both ways. Empty, or why that cannot be. A pair that was open before is tried again if
  /// somebody has closed it meanwhile (`cudaDeviceReset`).
  static std::string open(int a, int b, bool is_new) {
    for (const auto& [own, peer] : {std::pair(a, b), std::pair(b, a)}) {
      const std::string refusal = enable(own, peer, is_new);
      if (!refusal.empty()) return refusal;
    }
    if (!is_new) return {};
    if (!PeerTrial(a, b).succeeds()) {
      disable(a, b);
      disable(b, a);
      return text({"GPUs ", a, " and ", b,
                   " do not get each other's bytes right: an IOMMU or PCIe's access control (ACS) "
                   "stands between them. Turn these off (in the BIOS, or the kernel's iommu=pt)"});
    }
    share_pools(a, b);
    share_pools(b, a);
    return {};
  }

  /// Sets `is_new` if it was not open.
  static std::string enable(int own, int peer, bool& is_new) {
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

  /// So that copies go through the host as well, where the direct way is wrong.
  static void disable(int own, int peer) {
    const OnGpu current(static_cast<std::size_t>(own));
    if (cudaDeviceDisablePeerAccess(peer) != cudaSuccess) static_cast<void>(cudaGetLastError());
  }

  /// Peer access does not hold for memory of `cudaMallocAsync`, which its pool grants. If it does
  /// not, calls with such memory are refused.
  static void share_pools(int owner, int user) {
    cudaMemAccessDesc access{};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = user;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    for (cudaMemPool_t pool : usual_pools(owner)) {
      if (cudaMemPoolSetAccess(pool, &access, 1) != cudaSuccess)
        static_cast<void>(cudaGetLastError());
    }
  }
};

}  // namespace lockstep::detail::threads
