// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gradients on their way from autograd's memory into buckets: small ones travel together.

#include <ATen/core/Tensor.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/runtime.cuh"

namespace lockstep::detail {

/// Copies that one kernel makes. Each block has a tile of one of them.
struct CopiesTogether {
  static constexpr std::size_t most = 32;
  static constexpr unsigned threads = 256;
  static constexpr std::size_t packet = 16;
  static constexpr std::size_t tile = std::size_t{threads} * packet * 4;

  struct Copy {
    const char* from;
    char* to;
    std::size_t bytes;
    unsigned end;  // the tile after its last one
  };
  Copy copies[most];

  static bool is_aligned(const void* data) {
    return reinterpret_cast<std::uintptr_t>(data) % packet == 0;
  }
};

/// A template, because a kernel in a header cannot be inline.
template <class All>
LOCKSTEP_KERNEL __launch_bounds__(All::threads) copy_together(All all) {
  unsigned i = 0;
  while (blockIdx.x >= all.copies[i].end) ++i;
  const auto& copy = all.copies[i];
  const std::size_t begin = (blockIdx.x - (i == 0 ? 0 : all.copies[i - 1].end)) * All::tile;
  const std::size_t end = begin + All::tile < copy.bytes ? begin + All::tile : copy.bytes;
  const std::size_t whole = end / All::packet * All::packet;
  for (std::size_t at = begin + threadIdx.x * All::packet; at < whole;
       at += All::threads * All::packet)
    *reinterpret_cast<uint4*>(copy.to + at) = *reinterpret_cast<const uint4*>(copy.from + at);
  const std::size_t at = whole + threadIdx.x;  // fewer bytes than threads
  if (at < end) copy.to[at] = copy.from[at];
}

/// The gradients of one backward pass. Each is copied before so many bytes wait that a reduction
/// would begin much later for them: for small models, launches take longer than what they copy.
template <class Step>
class GradientCopies {
 public:
  explicit GradientCopies(Step& step) : step_(step) {}

  /// A gradient whose bytes the step is to have at `to`. **Stream** the step's, on which it was
  /// computed; here or in a later call.
  void add(std::size_t parameter, void* to, const at::Tensor& gradient) {
    waiting_[count_++] = {parameter, to, gradient};
    bytes_ += gradient.nbytes();
    if (count_ == waiting_.size() || bytes_ >= most_waiting) copy();
  }
  /// After the last one.
  void finish() { copy(); }

 private:
  static constexpr std::size_t most_waiting = std::size_t{1} << 20;

  struct Waiting {
    std::size_t parameter;
    void* to;
    at::Tensor gradient;
  };

  void copy() {
    CopiesTogether together;
    std::size_t copies = 0;
    unsigned tiles = 0;
    for (std::size_t i = 0; i != count_; ++i) {
      const auto& [parameter, to, gradient] = waiting_[i];
      const void* const from = gradient.const_data_ptr();
      const std::size_t bytes = gradient.nbytes();
      if (count_ == 1 || !CopiesTogether::is_aligned(from) || !CopiesTogether::is_aligned(to)) {
        check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, step_.stream()),
                   "cudaMemcpyAsync");
      } else if (bytes != 0) {
        tiles += static_cast<unsigned>((bytes + CopiesTogether::tile - 1) / CopiesTogether::tile);
        together.copies[copies++] = {static_cast<const char*>(from), static_cast<char*>(to), bytes,
                                     tiles};
      }
    }
    if (copies != 0) {
      launch_kernel<copy_together<CopiesTogether>>("copy_together", step_.stream(), tiles,
                                                   CopiesTogether::threads, together);
    }
    // The allocator may give their memory to what comes later on the same stream.
    for (std::size_t i = 0; i != count_; ++i) {
      waiting_[i].gradient.reset();
      step_.ready(waiting_[i].parameter);
    }
    count_ = 0;
    bytes_ = 0;
  }

  Step& step_;
  std::array<Waiting, CopiesTogether::most> waiting_{};
  std::size_t count_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace lockstep::detail
