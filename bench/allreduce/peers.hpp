// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What lockstep is compared with: shared memory staged plainly, Gloo, and memcpy.

#include <atomic>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <span>

#include "barrier.hpp"
#include "measure.hpp"

namespace bench {

/// Copy in, barrier, reduce one's own slice, barrier, copy out.
class PlainStaged {
 public:
  /// Shared memory for `ranks` inputs and a result of `count` elements each.
  static constexpr std::size_t bytes(std::size_t ranks, std::size_t count) {
    return sizeof(Barrier) + (ranks + 1) * count * sizeof(float);
  }

  PlainStaged(void* shared, std::size_t rank, std::size_t ranks, std::size_t count);

  void all_reduce(std::span<float> data);

 private:
  Barrier* barrier_;
  float* inputs_;
  float* result_;
  std::size_t rank_;
  std::size_t ranks_;
  std::size_t count_;
};

/// Gloo's all-reduce in place over TCP on loopback, with the algorithm Gloo chooses itself, which
/// is what PyTorch calls. Ranks meet in `folder`. Empty where Gloo is missing; throws if it cannot
/// connect.
std::function<void(std::span<float>)> make_gloo(const std::filesystem::path& folder,
                                                std::size_t rank, std::size_t ranks);

/// The same, unless a rank cannot connect: then no rank has it. `without` counts those, from zero.
std::function<void(std::span<float>)> connect_gloo(const std::filesystem::path& folder,
                                                   std::size_t rank, std::size_t ranks,
                                                   std::atomic<std::size_t>& without, Stand& stand);

/// A copy that the compiler cannot leave out.
void copy(const float* from, float* to, std::size_t count);

}  // namespace bench
