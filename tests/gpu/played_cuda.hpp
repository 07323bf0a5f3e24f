// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of CUDA's runtime that the library uses, played on the host for programs without
/// a GPU, with as many GPUs as a test wants. A program that includes it is not linked with CUDA's
/// own. Kernels are in played_kernels.hpp.

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

#include "played_device.hpp"
#include "played_memory.hpp"
#include "played_streams.hpp"

namespace played {

/// How long every copy to the GPU takes at least.
inline std::atomic<int> upload_milliseconds = 0;

/// Work for a stream: what a call that is played elsewhere has to do.
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

}  // namespace played

extern "C" {

// ---- Streams

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  played::count(__func__);
  return *stream = played::Gpu::get().make_stream(), cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  played::count(__func__);
  return *stream = played::Gpu::get().make_stream(), cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  played::count(__func__);
  return played::Gpu::get().end_stream(stream), cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  played::count(__func__);
  return played::Gpu::get().synchronize(stream);
}
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
  played::count(__func__);
  return played::Gpu::get().query(stream);
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  played::count(__func__);
  if (const cudaError_t error = played::check_event("a wait", event)) return error;
  return played::Gpu::get().enqueue(stream, {nullptr, event, nullptr, 0, nullptr});
}
inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t f, void* data) {
  played::count(__func__);
  return played::enqueue(stream, [=] { f(data); });
}
inline cudaError_t cudaDeviceSynchronize() {
  played::count(__func__);
  if (played::forbids_waiting()) return played::not_in_capture();
  const int gpu = played::current_gpu;
  const std::chrono::milliseconds most(played::most_wait_milliseconds);
  if (!played::Gpu::get().drain([&](int other) { return other == gpu; }, most))
    return played::fault(cudaErrorUnknown, played::gpu_text(gpu) + " does not come to an end");
  return cudaSuccess;
}

// ---- Events

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  played::count(__func__);
  return *event = played::Gpu::get().make_event(), cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {  // streams may still refer to it
  played::count(__func__);
  return played::Gpu::get().end_event(event), cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  played::count(__func__);
  if (const cudaError_t error = played::check_event("a record", event)) return error;
  const int gpu = stream == nullptr ? played::current_gpu : stream->gpu;
  if (event->gpu != gpu) {
    return played::fault(cudaErrorInvalidResourceHandle,
                         "an event of " + played::gpu_text(event->gpu) +
                             " is recorded in a stream of " + played::gpu_text(gpu));
  }
  return played::Gpu::get().enqueue(stream, {nullptr, nullptr, event, 0, nullptr});
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  played::count(__func__);
  if (const cudaError_t error = played::check_event("a query", event)) return error;
  return played::Gpu::get().query(event);
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  played::count(__func__);
  if (const cudaError_t error = played::check_event("a wait", event)) return error;
  return played::Gpu::get().synchronize(event);
}

// ---- Memory

inline cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  played::count(__func__);
  if (played::forbids_waiting()) return played::not_in_capture();
  played::Memory::get().settle(__func__, played::current_gpu);
  *data = played::Memory::get().allocate({bytes, played::current_gpu, false, nullptr});
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* data) {
  played::count(__func__);
  if (data == nullptr) return cudaSuccess;
  if (played::forbids_waiting()) return played::not_in_capture();
  const int gpu = played::Memory::get().gpu_of(data);
  if (gpu >= 0) played::Memory::get().settle(__func__, gpu);
  return played::Memory::get().free(data), cudaSuccess;
}
inline cudaError_t cudaMallocHost(void** data, std::size_t bytes) {
  played::count(__func__);
  *data = played::Memory::get().allocate({bytes, played::current_gpu, true, nullptr});
  return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  return cudaMallocHost(data, bytes);
}
inline cudaError_t cudaFreeHost(void* data) {
  played::count(__func__);
  return played::Memory::get().free(data), cudaSuccess;
}
inline cudaError_t cudaHostRegister(void*, std::size_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
inline cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return *free = *total = std::size_t{1} << 34, cudaSuccess;
}

/// Memory of the pool of the stream's GPU.
inline cudaError_t cudaMallocAsync(void** data, std::size_t bytes, cudaStream_t stream) {
  played::count(__func__);
  const int gpu = stream == nullptr ? played::current_gpu : stream->gpu;
  auto& memory = played::Memory::get();
  return *data = memory.allocate({bytes, gpu, false, memory.pool(gpu)}), cudaSuccess;
}
inline cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  played::count(__func__);
  return played::enqueue(stream, [=] { played::Memory::get().free(data); });
}
inline cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int gpu) {
  return *pool = played::Memory::get().pool(gpu), cudaSuccess;
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
  played::count(__func__);
  return *data = played::Memory::get().allocate({bytes, pool->gpu, false, pool}), cudaSuccess;
}
inline cudaError_t cudaMallocManaged(void** data, std::size_t bytes, unsigned) {
  played::count(__func__);
  *data = played::Memory::get().allocate({bytes, played::current_gpu, true, nullptr, true});
  return cudaSuccess;
}
/// The driver's function, of which the library asks for a pointer's pool.
inline CUresult played_pointer_attribute(void* value, CUpointer_attribute attribute,
                                         CUdeviceptr pointer) {
  played::count("cuPointerGetAttribute");
  const auto block = played::Memory::get().find(reinterpret_cast<const void*>(pointer));
  if (attribute != CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE || !block) return CUDA_ERROR_INVALID_VALUE;
  return *static_cast<cudaMemPool_t*>(value) = block->pool, CUDA_SUCCESS;
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* found) {
  const bool is_known = std::string_view(name) == "cuPointerGetAttribute";
  *f = is_known ? reinterpret_cast<void*>(&played_pointer_attribute) : nullptr;
  *found = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                            const void* pointer) {
  played::count(__func__);
  *attributes = {};
  attributes->device = played::current_gpu;
  attributes->type = cudaMemoryTypeUnregistered;
  if (const auto block = played::Memory::get().find(pointer)) {
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
  played::count(__func__);
  return played::enqueue(stream, [=] { std::memset(data, value, bytes); });
}
/// **Host** does not wait, unlike many expect.
inline cudaError_t cudaMemset(void* data, int value, std::size_t bytes) {
  played::count(__func__);
  if (played::forbids_waiting()) return played::not_in_capture();
  return played::enqueue(nullptr, [=] { std::memset(data, value, bytes); });
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes,
                                   cudaMemcpyKind kind, cudaStream_t stream) {
  played::count(__func__);
  const std::chrono::milliseconds pause(
      kind == cudaMemcpyHostToDevice ? played::upload_milliseconds.load() : 0);
  return played::enqueue(stream, [=] {
    std::this_thread::sleep_for(pause);
    played::copy(to, from, bytes);
  });
}
inline cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                                     std::size_t from_pitch, std::size_t width, std::size_t rows,
                                     cudaMemcpyKind, cudaStream_t stream) {
  played::count(__func__);
  if (width > to_pitch || width > from_pitch)
    return played::fault(cudaErrorInvalidPitchValue, "rows of a copy overlap");
  return played::enqueue(stream, [=] {
    for (std::size_t r = 0; r < rows; ++r) {
      played::copy(static_cast<char*>(to) + r * to_pitch,
                   static_cast<const char*>(from) + r * from_pitch, width);
    }
  });
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  played::count(__func__);
  if (played::forbids_waiting()) return played::not_in_capture();
  const cudaError_t error = played::enqueue(nullptr, [=] { played::copy(to, from, bytes); });
  return error != cudaSuccess ? error : played::Gpu::get().synchronize(cudaStream_t{nullptr});
}
inline cudaError_t cudaMemcpyPeerAsync(void* to, int to_gpu, const void* from, int from_gpu,
                                       std::size_t bytes, cudaStream_t stream) {
  played::count(__func__);
  if (played::Memory::get().gpu_of(to) != to_gpu || played::Memory::get().gpu_of(from) != from_gpu)
    return played::fault(cudaErrorInvalidValue, "a copy between GPUs names the wrong GPU");
  return played::enqueue(stream, [=] { played::copy(to, from, bytes); });
}
inline cudaError_t cudaMemcpyPeer(void* to, int to_gpu, const void* from, int from_gpu,
                                  std::size_t bytes) {
  const cudaError_t error = cudaMemcpyPeerAsync(to, to_gpu, from, from_gpu, bytes, nullptr);
  return error != cudaSuccess ? error : played::Gpu::get().synchronize(cudaStream_t{nullptr});
}

// ---- Graphs

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  played::count(__func__);
  return played::Gpu::get().begin_capture(stream, mode == cudaStreamCaptureModeRelaxed);
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  played::count(__func__);
  return played::Gpu::get().end_capture(stream, graph);
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return *status = played::Gpu::get().capture_status(stream), cudaSuccess;
}
inline cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, std::size_t* count) {
  return *count = graph->nodes.size(), cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                        unsigned long long) {
  *executable = new CUgraphExec_st{std::make_shared<const std::vector<played::Node>>(graph->nodes)};
  return cudaSuccess;
}
inline cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return delete executable, cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  played::count(__func__);
  return played::enqueue(stream, [nodes = executable->nodes] {
    thread_local std::mt19937 chance(std::random_device{}());
    played::Gpu::play(*nodes, chance);
  });
}
}
