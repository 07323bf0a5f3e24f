// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The memory of played GPUs: who owns it, and who may touch it.

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "played_device.hpp"
#include "played_streams.hpp"

/// A GPU's default pool, of which the others have no access unless they are given it.
struct CUmemPoolHandle_st {
  int gpu = 0;
  std::array<std::atomic<bool>, played::most_gpus> accesses = {};
};

namespace played {

/// How long CUDA may wait for GPUs when memory is allocated or freed. Longer is a deadlock.
inline std::atomic<int> most_wait_milliseconds = 20000;

/// While this is not 0, GPUs may wait for each other, so that nothing may be allocated or freed.
inline std::atomic<int> stages_under_way = 0;

class Memory {
 public:
  struct Block {
    std::size_t bytes = 0;
    int gpu = 0;
    bool is_host = false;
    cudaMemPool_t pool = nullptr;
    bool is_managed = false;  // the host's and every GPU's
  };

  static Memory& get() {
    static auto* const memory = new Memory;
    return *memory;
  }

  void* allocate(Block block) {
    const std::size_t size = (block.bytes + 255) / 256 * 256;
    void* const data = std::aligned_alloc(256, size == 0 ? 256 : size);
    std::memset(data, 0xfb, std::min<std::size_t>(size, 1 << 20));  // nobody has zeroed it
    const std::lock_guard lock(mutex_);
    blocks_[reinterpret_cast<std::uintptr_t>(data)] = block;
    return data;
  }
  void free(void* data) {
    if (data == nullptr) return;
    {
      const std::lock_guard lock(mutex_);
      if (blocks_.erase(reinterpret_cast<std::uintptr_t>(data)) == 0)
        return note_fault("memory is freed that was not allocated");
    }
    std::free(data);
  }
  std::optional<Block> find(const void* pointer) {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    const std::lock_guard lock(mutex_);
    const auto next = blocks_.upper_bound(address);
    if (next == blocks_.begin()) return std::nullopt;
    const auto& [begin, block] = *std::prev(next);
    if (address >= begin + block.bytes) return std::nullopt;
    return block;
  }
  /// The GPU whose memory this is, or -1.
  int gpu_of(const void* pointer) {
    const auto block = find(pointer);
    return block && !block->is_host ? block->gpu : -1;
  }

  cudaMemPool_t pool(int gpu) {
    CUmemPoolHandle_st& pool = pools_[static_cast<std::size_t>(gpu)];
    pool.gpu = gpu;
    return &pool;
  }
  void forget_access() {
    for (CUmemPoolHandle_st& pool : pools_)
      for (auto& access : pool.accesses) access = false;
  }

  /// Memory of `gpu` is allocated or freed by `call`: CUDA may wait for that GPU and for all that
  /// are its peers.
  void settle(const char* call, int gpu) {
    const std::string what = std::string(call) + " on " + gpu_text(gpu);
    if (stages_under_way != 0) {
      note_fault(what +
                 " between the stages of a collective: it may wait for GPUs that wait for "
                 "this one");
    }
    const auto concerns = [&](int other) { return accesses(gpu, other) || accesses(other, gpu); };
    if (!Gpu::get().drain(concerns, std::chrono::milliseconds(most_wait_milliseconds))) {
      note_fault(what +
                 " waits for streams of this GPU and its peers, which do not come to an "
                 "end: a rank that they wait for is waiting here");
    }
  }

 private:
  Memory() = default;

  std::mutex mutex_;
  std::map<std::uintptr_t, Block> blocks_;
  std::array<CUmemPoolHandle_st, most_gpus> pools_;
};

/// May a kernel on `gpu` touch this memory?
inline bool may_touch(int gpu, const Memory::Block& block) {
  if (block.is_host || block.gpu == gpu) return true;
  if (block.pool != nullptr) return block.pool->accesses[static_cast<std::size_t>(gpu)];
  return accesses(gpu, block.gpu);
}

/// Copies, as the hardware between the GPUs does.
inline void copy(void* to, const void* from, std::size_t bytes) {
  std::memmove(to, from, bytes);
  if (!host.corrupts_copies) return;
  const int source = Memory::get().gpu_of(from);
  const int target = Memory::get().gpu_of(to);
  if (source < 0 || target < 0 || source == target) return;
  if (!accesses(source, target) && !accesses(target, source)) return;  // through the host
  auto* const data = static_cast<unsigned char*>(to);
  for (std::size_t i = 0; i < bytes; i += 64) data[i] = static_cast<unsigned char>(~data[i]);
}

}  // namespace played
