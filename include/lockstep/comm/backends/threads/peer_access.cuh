// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Whether the GPUs of a process may use each other's memory. It is asked, opened and tried
/// once for each pair of them, when the first ranks that need it join.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/threads/kernels.cuh"
#include "lockstep/core/text.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/on_gpu.cuh"
#include "lockstep/device/cuda/stream.cuh"

namespace lockstep::detail::threads {

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

/// Tries what ranks do with a peer's memory: kernels store to it and load from it, and copies are
/// made. An IOMMU that translates the traffic between two PCIe devices can make all of that end
/// without an error and with other bytes.
class PeerTrial {
 public:
  /// `own` works on the memory of `peer`.
  PeerTrial(int own, int peer)
      : own_(own), peer_(peer), near_(memory_of(own)), far_(memory_of(peer)) {}

  /// Do all bytes arrive? **Host** blocks.
  bool succeeds() const {
    const OnGpu current(static_cast<std::size_t>(own_));
    const CudaStream stream;
    const auto arrives = [&](unsigned way, const DeviceArena& from, const DeviceArena& to,
                             const auto& move) {
      const std::vector<unsigned char> sent = pattern(way);
      copy_now(from.data(), sent.data(), bytes);
      move(reinterpret_cast<const unsigned char*>(from.data()),
           reinterpret_cast<unsigned char*>(to.data()));
      stream.synchronize();
      std::vector<unsigned char> arrived(bytes);
      copy_now(arrived.data(), to.data(), bytes);
      return arrived == sent;
    };
    const auto by_kernel = [&](const unsigned char* from, unsigned char* to) {
      Movement work{};
      work.in[0] = from;
      work.out[0] = to;
      work.pass = PacketPass::cut<unsigned char>(bytes, 0);
      work.targets = 1;
      move_bytes<false><<<work.pass.grid<unsigned char>(8), PacketPass::threads, 0, stream>>>(work);
      check_launch("move_bytes");
    };
    const auto by_copy = [&](const unsigned char* from, unsigned char* to) {
      check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    };
    return arrives(1, near_, far_, by_kernel) && arrives(2, far_, near_, by_kernel) &&
           arrives(3, near_, far_, by_copy) && arrives(4, far_, near_, by_copy);
  }

 private:
  static constexpr std::size_t bytes =
      256 * 1024;  // more than a page of any size but the huge ones

  static DeviceArena memory_of(int device) {
    const OnGpu current(static_cast<std::size_t>(device));
    return DeviceArena(bytes);
  }
  /// Other bytes for every pair and every way.
  std::vector<unsigned char> pattern(unsigned way) const {
    std::vector<unsigned char> all(bytes);
    unsigned x = 0x9e3779b9u * (static_cast<unsigned>(own_ * 64 + peer_) * 4 + way);
    for (unsigned char& byte : all) {
      x = x * 1664525u + 1013904223u;
      byte = static_cast<unsigned char>(x >> 24);
    }
    return all;
  }

  int own_;
  int peer_;
  DeviceArena near_;
  DeviceArena far_;
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
    if (is_new) pair->second = open(a, b);
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

  /// Opens both ways. Empty, or why that cannot be.
  static std::string open(int a, int b) {
    for (const auto& [own, peer] : {std::pair(a, b), std::pair(b, a)}) {
      const std::string refusal = enable(own, peer);
      if (!refusal.empty()) return refusal;
    }
    if (!PeerTrial(a, b).succeeds() || !PeerTrial(b, a).succeeds()) {
      disable(a, b);
      disable(b, a);
      return text({"GPUs ", a, " and ", b,
                   " do not get each other's bytes right: an IOMMU or PCIe's access control (ACS) "
                   "stands between them. Turn them off (in the BIOS, or the kernel's iommu=pt)"});
    }
    share_pools(a, b);
    share_pools(b, a);
    return {};
  }

  static std::string enable(int own, int peer) {
    int possible = 0;
    check_cuda(cudaDeviceCanAccessPeer(&possible, own, peer), "cudaDeviceCanAccessPeer");
    if (possible == 0) {
      return text({"GPU ", own, " cannot access the memory of GPU ", peer,
                   ". NVLink or a common PCIe switch makes that possible (nvidia-smi topo -m)"});
    }
    const OnGpu current(static_cast<std::size_t>(own));
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaSuccess) return {};
    static_cast<void>(cudaGetLastError());
    if (error == cudaErrorPeerAccessAlreadyEnabled) return {};
    return text({"GPU ", own, " may not access the memory of GPU ", peer, " (",
                 cudaGetErrorString(error), "). A GPU has at most eight peers without NVSwitch"});
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
