// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of CUDA's runtime that orders copies, played on the host for programs without a
/// GPU. Streams run as fast as they like, within what their events allow. Included by
/// one file of a program, which is then not linked with CUDA's own.

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "played_device.hpp"

struct CUevent_st {
  std::uint64_t recorded = 0;  // how often
  std::uint64_t reached = 0;   // which record
};

struct CUstream_st {
  struct Item {
    std::function<void()> work;
    cudaEvent_t wait = nullptr;    // for this record of it
    cudaEvent_t record = nullptr;  // as this one
    std::uint64_t number = 0;
  };
  std::deque<Item> items;
  bool is_ending = false;
  std::thread thread;
};

namespace played {

/// How long every copy to the GPU takes at least.
inline std::atomic<int> upload_milliseconds = 0;

/// The streams of a process, each with a thread, and its memory. It is never ended: events that are
/// gone may still be waited for.
class Gpu {
 public:
  static Gpu& get() {
    static Gpu* const gpu = new Gpu;
    return *gpu;
  }

  cudaStream_t make_stream() {
    auto* const stream = new CUstream_st;
    stream->thread = std::thread([this, stream] { run(*stream); });
    return stream;
  }
  void end_stream(cudaStream_t stream) {
    {
      const std::lock_guard lock(mutex_);
      stream->is_ending = true;
      changed_.notify_all();
    }
    stream->thread.join();
    delete stream;
  }

  void enqueue(cudaStream_t stream, CUstream_st::Item item) {
    const std::lock_guard lock(mutex_);
    if (item.record != nullptr) item.number = ++item.record->recorded;
    if (item.wait != nullptr) item.number = item.wait->recorded;
    stream->items.push_back(std::move(item));
    changed_.notify_all();
  }
  void synchronize(cudaStream_t stream) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stream == nullptr || stream->items.empty(); });
  }
  bool is_empty(cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    return stream->items.empty();
  }
  bool is_reached(cudaEvent_t event) {
    const std::lock_guard lock(mutex_);
    return event->reached == event->recorded;
  }

  void* allocate(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    void* const data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    memory_[data] = bytes;
    return data;
  }
  void free(void* data) {
    const std::lock_guard lock(mutex_);
    memory_.erase(data);
    std::free(data);
  }
  bool has(const void* pointer) {
    const std::lock_guard lock(mutex_);
    const auto next = memory_.upper_bound(const_cast<void*>(pointer));
    if (next == memory_.begin()) return false;
    const auto& [begin, bytes] = *std::prev(next);
    return static_cast<const char*>(pointer) < static_cast<const char*>(begin) + bytes;
  }

 private:
  Gpu() = default;

  void run(CUstream_st& stream) {
    std::mt19937 chance(std::random_device{}());
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] {
        if (stream.items.empty()) return stream.is_ending;
        const CUstream_st::Item& item = stream.items.front();
        return item.wait == nullptr || item.wait->reached >= item.number;
      });
      if (stream.items.empty()) return;
      CUstream_st::Item& item = stream.items.front();
      if (item.work) {
        lock.unlock();
        if (chance() % 4 == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(chance() % 300));
        item.work();
        lock.lock();
      }
      if (item.record != nullptr && item.record->reached < item.number)
        item.record->reached = item.number;
      stream.items.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<void*, std::size_t> memory_;
};

}  // namespace played

extern "C" {
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return *stream = played::Gpu::get().make_stream(), cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return *stream = played::Gpu::get().make_stream(), cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return played::Gpu::get().end_stream(stream), cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return played::Gpu::get().synchronize(stream), cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return played::Gpu::get().is_empty(stream) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return played::Gpu::get().enqueue(stream, {nullptr, event, nullptr, 0}), cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = new CUevent_st, cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }  // streams may still refer to it
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return played::Gpu::get().enqueue(stream, {nullptr, nullptr, event, 0}), cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return played::Gpu::get().is_reached(event) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  return *data = played::Gpu::get().allocate(bytes), cudaSuccess;
}
cudaError_t cudaFree(void* data) { return played::Gpu::get().free(data), cudaSuccess; }
cudaError_t cudaMallocHost(void** data, std::size_t bytes) {
  return *data = std::malloc(bytes), cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) { return std::free(data), cudaSuccess; }
cudaError_t cudaHostRegister(void*, std::size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaMemset(void* data, int value, std::size_t bytes) {
  return std::memset(data, value, bytes), cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const std::chrono::milliseconds pause(
      kind == cudaMemcpyHostToDevice ? played::upload_milliseconds.load() : 0);
  const auto copy = [=] {
    std::this_thread::sleep_for(pause);
    std::memcpy(to, from, bytes);
  };
  return played::Gpu::get().enqueue(stream, {copy, nullptr, nullptr, 0}), cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  attributes->type =
      played::Gpu::get().has(pointer) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
}
