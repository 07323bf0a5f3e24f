// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The memory of emulated GPUs: who owns it, and who may touch it.

#include <cuda_runtime_api.h>
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <algorithm>
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

#include "gpu/emulated/device.hpp"
#include "gpu/emulated/streams.hpp"

/// A GPU's default pool, of which the others have no access unless they are given it.
struct CUmemPoolHandle_st {
  int gpu = 0;
  std::array<std::atomic<bool>, emulated::most_gpus> accesses = {};
};

namespace emulated {

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

  /// Pages of its own, with unmapped ones around them, at an address that is not used again.
  void* allocate(Block block) {
    const std::lock_guard lock(mutex_);
    const std::size_t size = pages(block.bytes);
    // The lower half of an address is what no argument of a kernel looks like, neither a count nor
    // a number: what padding holds behind one does not make an address of it.
    if ((next_ & 0xffff'ffff) + size > 0x9800'0000) next_ = (next_ >> 32 << 32) + 0x1'9000'0000;
    void* const data = ::mmap(reinterpret_cast<void*>(next_), size, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (data == MAP_FAILED) std::abort();
    std::memset(data, 0xfb, std::min<std::size_t>(block.bytes, 1 << 20));  // nobody has zeroed it
    ASAN_POISON_MEMORY_REGION(static_cast<char*>(data) + block.bytes, size - block.bytes);
    blocks_[next_] = block;
    next_ += size + pages(1);
    return data;
  }
  void free(void* data) {
    if (data == nullptr) return;
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(reinterpret_cast<std::uintptr_t>(data));
    if (found == blocks_.end()) return note_fault("memory is freed that was not allocated");
    ::munmap(data, pages(found->second.bytes));
    blocks_.erase(found);
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
  void wait_for_gpus(const char* call, int gpu) {
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
  static std::size_t pages(std::size_t bytes) { return (bytes / 65536 + 1) * 65536; }

  std::mutex mutex_;
  std::uintptr_t next_ = 0x2a90'9000'0000;
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

}  // namespace emulated
