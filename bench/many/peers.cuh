// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What each GPU reaches of the others: copies and a kernel's own loads and stores, looked at
/// byte by byte, because an IOMMU or a PCIe switch can spoil them without an error; then how fast.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>

#include "lockstep/detail/device/cuda/memory.cuh"
#include "lockstep/detail/device/cuda/runtime.cuh"
#include "timing.cuh"
#include "where.cuh"

namespace many {

using lockstep::check_cuda;

constexpr std::size_t peer_words = std::size_t{16} << 20;  // 64 MiB

inline __host__ __device__ std::uint32_t word_at(std::size_t i, std::uint32_t seed) {
  return (static_cast<std::uint32_t>(i) + seed) * 2654435761u;
}

/// Words that another GPU's memory does not have by chance.
static __global__ void write_words(std::uint32_t* words, std::size_t count, std::uint32_t seed) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
    words[i] = word_at(i, seed);
}

static __global__ void count_wrong(const std::uint32_t* words, std::size_t count,
                                   std::uint32_t seed, unsigned long long* wrong) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
    if (words[i] != word_at(i, seed)) atomicAdd(wrong, 1ull);
}

/// A device with memory that the others copy from and to. Whoever calls it makes it current.
class Peer {
 public:
  explicit Peer(int device)
      : device_(selected(device)), words_(4 * peer_words), wrong_(sizeof(unsigned long long)) {}

  int device() const { return device_; }
  std::uint32_t* words() const { return reinterpret_cast<std::uint32_t*>(words_.data()); }

  /// Kernels of this device, on the memory of any device that it reaches.
  void write(std::uint32_t* words, std::uint32_t seed) const {
    selected(device_);
    write_words<<<256, 256, 0, stream_>>>(words, peer_words, seed);
    check_cuda(cudaGetLastError(), "write_words");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  bool reads(const std::uint32_t* words, std::uint32_t seed) const {
    selected(device_);
    auto* const counter = reinterpret_cast<unsigned long long*>(wrong_.data());
    check_cuda(cudaMemsetAsync(counter, 0, sizeof *counter, stream_), "cudaMemsetAsync");
    count_wrong<<<256, 256, 0, stream_>>>(words, peer_words, seed, counter);
    check_cuda(cudaGetLastError(), "count_wrong");
    unsigned long long wrong = 0;
    check_cuda(cudaMemcpyAsync(&wrong, counter, sizeof wrong, cudaMemcpyDeviceToHost, stream_),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return wrong == 0;
  }

  /// GB/s of copies to this device, after one that is not counted.
  double copy_from(const Peer& other) const {
    selected(device_);
    constexpr int times = 10;
    const bench::Mark begin, end;
    for (int i = 0; i <= times; ++i) {
      if (i == 1) begin.record(stream_);
      check_cuda(cudaMemcpyPeerAsync(words(), device_, other.words(), other.device_, 4 * peer_words,
                                     stream_),
                 "cudaMemcpyPeerAsync");
    }
    end.record(stream_);
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return 4e-3 * static_cast<double>(peer_words) * times / end.microseconds_since(begin);
  }

 private:
  static int selected(int device) {
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    return device;
  }

  int device_;
  lockstep::DeviceArena words_;
  lockstep::DeviceArena wrong_;
  lockstep::CudaStream stream_;  // of the device above, which is current now
};

/// A copy to `to`, by whatever way CUDA finds; then, with peer access, `to` reads the other's
/// memory and writes it. A line says what came out; false if a byte was wrong.
inline bool print_pair(const Peer& to, const Peer& from, std::uint32_t seed) {
  from.write(from.words(), seed);
  to.write(to.words(), ~seed);  // nothing of what is to come is there already
  const double copied = to.copy_from(from);
  const bool copy_right = to.reads(to.words(), seed);
  int reaches = 0;
  check_cuda(cudaDeviceCanAccessPeer(&reaches, to.device(), from.device()),
             "cudaDeviceCanAccessPeer");
  bool reads_right = true;
  bool writes_right = true;
  double direct = 0;
  if (reaches != 0) {
    check_cuda(cudaSetDevice(to.device()), "cudaSetDevice");
    check_cuda(cudaDeviceEnablePeerAccess(from.device(), 0), "cudaDeviceEnablePeerAccess");
    reads_right = to.reads(from.words(), seed);
    to.write(from.words(), seed + 1);
    writes_right = from.reads(from.words(), seed + 1);
    direct = to.copy_from(from);
    writes_right = writes_right && to.reads(to.words(), seed + 1);
    check_cuda(cudaSetDevice(to.device()), "cudaSetDevice");
    check_cuda(cudaDeviceDisablePeerAccess(from.device()), "cudaDeviceDisablePeerAccess");
  }
  const auto word = [](bool right) { return right ? "true" : "false"; };
  std::printf(
      "many {\"what\": \"peer\", \"to\": %d, \"from\": %d, \"reaches\": %s, "
      "\"copy_right\": %s, \"reads_right\": %s, \"writes_right\": %s, "
      "\"copy_gbs\": %.1f, \"direct_gbs\": %.1f}\n",
      to.device(), from.device(), word(reaches != 0), word(copy_right), word(reads_right),
      word(writes_right), copied, direct);
  std::fflush(stdout);
  return copy_right && reads_right && writes_right;
}

/// Every device with every other, as CUDA_VISIBLE_DEVICES leaves them. True if all bytes were
/// right.
inline bool print_peers() {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  std::deque<Peer> peers;
  for (int device = 0; device < count; ++device) {
    peers.emplace_back(device);
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    std::printf(
        "many {\"what\": \"gpu\", \"device\": %d, \"name\": \"%s\", \"bus\": \"%s\", "
        "\"node\": %d, \"gib\": %.0f, \"multiprocessors\": %d}\n",
        device, properties.name, bus_id_of(device).c_str(), numa_node_of(device),
        static_cast<double>(properties.totalGlobalMem) / (1 << 30), properties.multiProcessorCount);
  }
  bool right = true;
  std::uint32_t seed = 1;
  for (const Peer& to : peers) {
    for (const Peer& from : peers) {
      if (&to != &from) right = print_pair(to, from, seed += 2) && right;
    }
  }
  return right;
}

}  // namespace many
