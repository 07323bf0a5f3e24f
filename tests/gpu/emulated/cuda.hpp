// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of CUDA's runtime that the library uses, emulated on the host for programs
/// without a GPU, with as many GPUs as a test wants. A program that includes it is not linked with
/// CUDA's own. Kernels are in kernels.hpp.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "gpu/emulated/device.hpp"
#include "gpu/emulated/memory.hpp"
#include "gpu/emulated/streams.hpp"

namespace emulated {

/// How long every copy to the GPU takes at least.
inline std::atomic<int> upload_milliseconds = 0;

/// Work for a stream: what a call that is emulated elsewhere has to do.
inline cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
  return Gpu::get().enqueue(stream, {std::move(work), nullptr, nullptr, 0, nullptr});
}

/// What a thread may not do while it captures a stream for itself.
inline bool forbids_waiting() { return Gpu::get().is_capturing_here(); }
inline cudaError_t not_in_capture() {
  return fail(cudaErrorStreamCaptureUnsupported, "this is not possible while a stream is captured");
}

inline cudaError_t check_event(const char* call, cudaEvent_t event) {
  if (!event->is_destroyed) return cudaSuccess;
  return fault(cudaErrorInvalidResourceHandle, std::string(call) + " of an event that is gone");
}

}  // namespace emulated

extern "C" {

// ---- Streams

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  emulated::count(__func__);
  return *stream = emulated::Gpu::get().make_stream(), cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  emulated::count(__func__);
  return *stream = emulated::Gpu::get().make_stream(), cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  emulated::count(__func__);
  return emulated::Gpu::get().end_stream(stream), cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  emulated::count(__func__);
  return emulated::Gpu::get().synchronize(stream);
}
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
  emulated::count(__func__);
  return emulated::Gpu::get().query(stream);
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  emulated::count(__func__);
  if (const cudaError_t error = emulated::check_event("a wait", event)) return error;
  return emulated::Gpu::get().enqueue(stream, {nullptr, event, nullptr, 0, nullptr});
}
inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t f, void* data) {
  emulated::count(__func__);
  return emulated::enqueue(stream, [=] { f(data); });
}
inline cudaError_t cudaDeviceSynchronize() {
  emulated::count(__func__);
  if (emulated::forbids_waiting()) return emulated::not_in_capture();
  const int gpu = emulated::current_gpu;
  const std::chrono::milliseconds most(emulated::most_wait_milliseconds);
  if (!emulated::Gpu::get().drain([&](int other) { return other == gpu; }, most))
    return emulated::fault(cudaErrorUnknown, emulated::gpu_text(gpu) + " does not come to an end");
  return cudaSuccess;
}

// ---- Events

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  emulated::count(__func__);
  return *event = emulated::Gpu::get().make_event(), cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {  // streams may still refer to it
  emulated::count(__func__);
  return emulated::Gpu::get().end_event(event), cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  emulated::count(__func__);
  if (const cudaError_t error = emulated::check_event("a record", event)) return error;
  const int gpu = stream == nullptr ? emulated::current_gpu : stream->gpu;
  if (event->gpu != gpu) {
    return emulated::fault(cudaErrorInvalidResourceHandle,
                           "an event of " + emulated::gpu_text(event->gpu) +
                               " is recorded in a stream of " + emulated::gpu_text(gpu));
  }
  return emulated::Gpu::get().enqueue(stream, {nullptr, nullptr, event, 0, nullptr});
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  emulated::count(__func__);
  if (const cudaError_t error = emulated::check_event("a query", event)) return error;
  return emulated::Gpu::get().query(event);
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  emulated::count(__func__);
  if (const cudaError_t error = emulated::check_event("a time", begin)) return error;
  if (const cudaError_t error = emulated::check_event("a time", end)) return error;
  if (const cudaError_t error = emulated::Gpu::get().query(end)) return error;
  const std::chrono::duration<float, std::milli> between = end->time - begin->time;
  return *milliseconds = between.count(), cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  emulated::count(__func__);
  if (const cudaError_t error = emulated::check_event("a wait", event)) return error;
  return emulated::Gpu::get().synchronize(event);
}

// ---- Memory

inline cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  emulated::count(__func__);
  if (emulated::forbids_waiting()) return emulated::not_in_capture();
  emulated::Memory::get().wait_for_gpus(__func__, emulated::current_gpu);
  *data = emulated::Memory::get().allocate({bytes, emulated::current_gpu, false, nullptr});
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* data) {
  emulated::count(__func__);
  if (data == nullptr) return cudaSuccess;
  if (emulated::forbids_waiting()) return emulated::not_in_capture();
  const int gpu = emulated::Memory::get().gpu_of(data);
  if (gpu >= 0) emulated::Memory::get().wait_for_gpus(__func__, gpu);
  return emulated::Memory::get().free(data), cudaSuccess;
}
inline cudaError_t cudaMallocHost(void** data, std::size_t bytes) {
  emulated::count(__func__);
  *data = emulated::Memory::get().allocate({bytes, emulated::current_gpu, true, nullptr});
  return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  return cudaMallocHost(data, bytes);
}
inline cudaError_t cudaFreeHost(void* data) {
  emulated::count(__func__);
  return emulated::Memory::get().free(data), cudaSuccess;
}
inline cudaError_t cudaHostRegister(void*, std::size_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
inline cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return *free = *total = std::size_t{1} << 34, cudaSuccess;
}

/// Memory of the pool of the stream's GPU.
inline cudaError_t cudaMallocAsync(void** data, std::size_t bytes, cudaStream_t stream) {
  emulated::count(__func__);
  const int gpu = stream == nullptr ? emulated::current_gpu : stream->gpu;
  auto& memory = emulated::Memory::get();
  return *data = memory.allocate({bytes, gpu, false, memory.pool(gpu)}), cudaSuccess;
}
inline cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  emulated::count(__func__);
  return emulated::enqueue(stream, [=] { emulated::Memory::get().free(data); });
}
inline cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int gpu) {
  return *pool = emulated::Memory::get().pool(gpu), cudaSuccess;
}
inline cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int gpu) {
  return cudaDeviceGetDefaultMemPool(pool, gpu);
}
inline cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc* descriptions,
                                        std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    pool->accesses[static_cast<std::size_t>(descriptions[i].location.id)] =
        descriptions[i].flags != cudaMemAccessFlagsProtNone;
  }
  return cudaSuccess;
}
inline cudaError_t cudaMemPoolGetAccess(cudaMemAccessFlags* flags, cudaMemPool_t pool,
                                        cudaMemLocation* location) {
  const bool may =
      location->id == pool->gpu || pool->accesses[static_cast<std::size_t>(location->id)];
  return *flags = may ? cudaMemAccessFlagsProtReadWrite : cudaMemAccessFlagsProtNone, cudaSuccess;
}
inline cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
  return *pool = new CUmemPoolHandle_st{properties->location.id, {}}, cudaSuccess;
}
inline cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) { return delete pool, cudaSuccess; }
inline cudaError_t cudaMallocFromPoolAsync(void** data, std::size_t bytes, cudaMemPool_t pool,
                                           cudaStream_t) {
  emulated::count(__func__);
  return *data = emulated::Memory::get().allocate({bytes, pool->gpu, false, pool}), cudaSuccess;
}
inline cudaError_t cudaMallocManaged(void** data, std::size_t bytes, unsigned) {
  emulated::count(__func__);
  *data = emulated::Memory::get().allocate({bytes, emulated::current_gpu, true, nullptr, true});
  return cudaSuccess;
}
/// The driver's function, of which the library asks for a pointer's pool.
inline CUresult emulated_pointer_attribute(void* value, CUpointer_attribute attribute,
                                           CUdeviceptr pointer) {
  emulated::count("cuPointerGetAttribute");
  const auto block = emulated::Memory::get().find(reinterpret_cast<const void*>(pointer));
  if (attribute != CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE || !block) return CUDA_ERROR_INVALID_VALUE;
  return *static_cast<cudaMemPool_t*>(value) = block->pool, CUDA_SUCCESS;
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* found) {
  const bool is_known = std::string_view(name) == "cuPointerGetAttribute";
  *f = is_known ? reinterpret_cast<void*>(&emulated_pointer_attribute) : nullptr;
  *found = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                            const void* pointer) {
  emulated::count(__func__);
  *attributes = {};
  attributes->device = emulated::current_gpu;
  attributes->type = cudaMemoryTypeUnregistered;
  if (const auto block = emulated::Memory::get().find(pointer)) {
    attributes->device = block->gpu;
    attributes->type = block->is_managed ? cudaMemoryTypeManaged
                       : block->is_host  ? cudaMemoryTypeHost
                                         : cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

// ---- Copies

inline cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  emulated::count(__func__);
  return emulated::enqueue(stream, [=] { std::memset(data, value, bytes); });
}
/// **Host** does not wait, unlike many expect.
inline cudaError_t cudaMemset(void* data, int value, std::size_t bytes) {
  emulated::count(__func__);
  if (emulated::forbids_waiting()) return emulated::not_in_capture();
  return emulated::enqueue(nullptr, [=] { std::memset(data, value, bytes); });
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes,
                                   cudaMemcpyKind kind, cudaStream_t stream) {
  emulated::count(__func__);
  const std::chrono::milliseconds pause(
      kind == cudaMemcpyHostToDevice ? emulated::upload_milliseconds.load() : 0);
  return emulated::enqueue(stream, [=] {
    std::this_thread::sleep_for(pause);
    emulated::copy(to, from, bytes);
  });
}
inline cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                                     std::size_t from_pitch, std::size_t width, std::size_t rows,
                                     cudaMemcpyKind, cudaStream_t stream) {
  emulated::count(__func__);
  if (width > to_pitch || width > from_pitch)
    return emulated::fault(cudaErrorInvalidPitchValue, "rows of a copy overlap");
  return emulated::enqueue(stream, [=] {
    for (std::size_t r = 0; r < rows; ++r) {
      emulated::copy(static_cast<char*>(to) + r * to_pitch,
                     static_cast<const char*>(from) + r * from_pitch, width);
    }
  });
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  emulated::count(__func__);
  if (emulated::forbids_waiting()) return emulated::not_in_capture();
  const cudaError_t error = emulated::enqueue(nullptr, [=] { emulated::copy(to, from, bytes); });
  return error != cudaSuccess ? error : emulated::Gpu::get().synchronize(cudaStream_t{nullptr});
}
inline cudaError_t cudaMemcpyPeerAsync(void* to, int to_gpu, const void* from, int from_gpu,
                                       std::size_t bytes, cudaStream_t stream) {
  emulated::count(__func__);
  if (emulated::Memory::get().gpu_of(to) != to_gpu ||
      emulated::Memory::get().gpu_of(from) != from_gpu)
    return emulated::fault(cudaErrorInvalidValue, "a copy between GPUs names the wrong GPU");
  return emulated::enqueue(stream, [=] { emulated::copy(to, from, bytes); });
}
inline cudaError_t cudaMemcpyPeer(void* to, int to_gpu, const void* from, int from_gpu,
                                  std::size_t bytes) {
  const cudaError_t error = cudaMemcpyPeerAsync(to, to_gpu, from, from_gpu, bytes, nullptr);
  return error != cudaSuccess ? error : emulated::Gpu::get().synchronize(cudaStream_t{nullptr});
}

// ---- Graphs

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  emulated::count(__func__);
  return emulated::Gpu::get().begin_capture(stream, mode == cudaStreamCaptureModeRelaxed);
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  emulated::count(__func__);
  return emulated::Gpu::get().end_capture(stream, graph);
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return *status = emulated::Gpu::get().capture_status(stream), cudaSuccess;
}
inline cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, std::size_t* count) {
  return *count = graph->nodes.size(), cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                        unsigned long long) {
  *executable =
      new CUgraphExec_st{std::make_shared<const std::vector<emulated::Node>>(graph->nodes)};
  return cudaSuccess;
}
inline cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return delete executable, cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  emulated::count(__func__);
  return emulated::enqueue(stream, [nodes = executable->nodes] {
    thread_local std::mt19937 chance(std::random_device{}());
    emulated::Gpu::play(*nodes, chance);
  });
}
}
