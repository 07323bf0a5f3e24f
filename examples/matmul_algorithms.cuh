// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file cuBLASLt's algorithms, chosen by measuring.

#include <cublasLt.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <sstream>
#include <string>

#include "lockstep/lockstep.cuh"

inline void check_cublas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
    return;
  throw lockstep::Error(
      call, std::string(cublasLtGetStatusName(status)) + ", " + cublasLtGetStatusString(status),
      "see cuBLAS's documentation of this status", lockstep::rank_of_thread());
}

/// As numbers of 16 bits: between -1 and 1, and of either kind of them.
static __global__ void fill_with_noise(std::uint16_t* to, std::size_t count) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  unsigned bits = static_cast<unsigned>(i) * 2654435761u;
  bits ^= bits >> 15;
  bits *= 2246822519u;
  to[i] = static_cast<std::uint16_t>(((bits >> 16) & 0x81ffu) | 0x3a00u);
}

/// Algorithms of products, chosen by trying those that cuBLASLt's heuristics name, and kept as
/// text: who reads it makes the same choices, and gets the same bits. It is for one version of
/// cuBLASLt and one kind of GPU, and says for which.
///
/// Ranks that choose differently sum differently. So one of them tries, and the others read its
/// text.
class MatmulAlgorithms {
 public:
  /// What becomes of products whose algorithm is not known: they are tried, or take the heuristics'
  /// first proposal.
  enum class Unknown { first, tried };

  MatmulAlgorithms() = default;
  explicit MatmulAlgorithms(const std::string& text, Unknown unknown = Unknown::first)
      : unknown_(unknown) {
    std::istringstream lines(text);
    std::string line;
    if (!std::getline(lines, line) || line != circumstances()) return;
    while (std::getline(lines, line)) {
      const auto colon = line.find(':');
      std::istringstream numbers(line.substr(colon + 1));
      cublasLtMatmulHeuristicResult_t choice{};
      for (auto& word : choice.algo.data) numbers >> word;
      if (numbers >> choice.workspaceSize) chosen_[line.substr(0, colon)] = choice;
    }
  }
  std::string text() const {
    std::ostringstream to;
    to << circumstances() << '\n';
    for (const auto& [name, choice] : chosen_) {
      to << name << ':';
      for (const auto word : choice.algo.data) to << ' ' << word;
      to << ' ' << choice.workspaceSize << '\n';
    }
    return to.str();
  }

  /// The choice for a product, if it is known.
  const cublasLtMatmulHeuristicResult_t* find(const std::string& name) const {
    const auto known = chosen_.find(name);
    return known == chosen_.end() ? nullptr : &known->second;
  }

  /// **Host** blocks while it tries. `run` enqueues the product by an algorithm on `stream()`.
  cublasLtMatmulHeuristicResult_t choose(
      const std::string& name, std::span<const cublasLtMatmulHeuristicResult_t> candidates,
      const auto& run) {
    auto least = std::chrono::steady_clock::duration::max();
    cublasLtMatmulHeuristicResult_t fastest = candidates.front();
    for (const auto& candidate : candidates) {
      const auto again = [&] { return run(candidate) == CUBLAS_STATUS_SUCCESS; };
      if (!again() || !again()) continue;
      stream_.synchronize();
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < times; ++i) again();
      stream_.synchronize();
      const auto took = std::chrono::steady_clock::now() - begin;
      if (took < least) {
        least = took;
        fastest = candidate;
      }
    }
    return chosen_[name] = fastest;
  }
  cudaStream_t stream() const { return stream_; }
  bool tries() const { return unknown_ == Unknown::tried; }

  /// Numbers that differ: of equal ones a product takes less power, and a GPU at its limit less
  /// time.
  std::byte* fill(const lockstep::DeviceArena& memory) const {
    const std::size_t count = memory.bytes() / sizeof(std::uint16_t);
    fill_with_noise<<<static_cast<unsigned>((count + 255) / 256), 256, 0, stream_>>>(
        reinterpret_cast<std::uint16_t*>(memory.data()), count);
    lockstep::check_launch("fill_with_noise");
    return memory.data();
  }

 private:
  static constexpr int times = 10;

  static std::string circumstances() {
    int device = 0;
    lockstep::check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    cudaDeviceProp properties{};
    lockstep::check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    return "cuBLASLt " + std::to_string(cublasLtGetVersion()) + ", " + properties.name;
  }

  Unknown unknown_ = Unknown::first;
  std::map<std::string, cublasLtMatmulHeuristicResult_t> chosen_;
  lockstep::CudaStream stream_;
};
