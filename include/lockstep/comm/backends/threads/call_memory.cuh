// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Whose memory the arguments of a call are, and whether every GPU that works on them can
/// reach them.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <string>

#include "lockstep/comm/backends/threads/lanes.cuh"
#include "lockstep/comm/call.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/gpu.cuh"

namespace lockstep::detail::threads {

/// The pool that `cudaMallocAsync` took memory from, null for other memory. Only the driver knows.
inline cudaMemPool_t pool_of(const void* pointer) {
  using Ask = CUresult(CUDAAPI*)(void*, CUpointer_attribute, CUdeviceptr);
  static const Ask ask = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    constexpr const char* name = "cuPointerGetAttribute";
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
    return error == cudaSuccess ? reinterpret_cast<Ask>(found) : nullptr;
  }();
  cudaMemPool_t pool = nullptr;
  if (ask == nullptr || ask(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
                            reinterpret_cast<CUdeviceptr>(pointer)) != CUDA_SUCCESS)
    return nullptr;
  return pool;
}

/// Where the arguments of a call are.
struct CallMemory {
  bool on_host = true;      // the host works on them
  bool is_managed = false;  // host code may read a result as soon as the call is over
};

/// Looks at the arguments of one rank's calls. CUDA is asked once for each argument; where GPUs use
/// each other's memory, the driver is asked once more.
class MemoryCheck {
 public:
  MemoryCheck(const Lanes& lanes, const Gpu& gpu, Rank rank)
      : lanes_(lanes), gpu_(gpu), rank_(rank) {}

  /// Arguments in host memory and in device memory are an error, and so is memory that not all GPUs
  /// can reach. Managed memory is either.
  template <class C>
  CallMemory operator()(const C& call) const {
    if (call.in.empty() || C::is_in_place) {
      if (!call.out.empty())
        return summary(look(call, call.out.data(), C::is_in_place ? "its data" : "out"));
      if (!call.in.empty()) return summary(look(call, call.in.data(), "in"));
      return {};
    }
    const Kind in = look(call, call.in.data(), "in");
    if (call.out.empty()) return summary(in);
    const Kind out = look(call, call.out.data(), "out");
    if ((in == Kind::host && out == Kind::device) || (in == Kind::device && out == Kind::host)) {
      throw Error(call.call().text(),
                  in == Kind::host ? "in is host memory and out is device memory"
                                   : "in is device memory and out is host memory",
                  "give both arguments in the same memory", rank_);
    }
    return {in == Kind::host || out == Kind::host, in == Kind::managed || out == Kind::managed};
  }

 private:
  enum class Kind { host, managed, device };

  static CallMemory summary(Kind kind) { return {kind == Kind::host, kind == Kind::managed}; }

  template <class C>
  Kind look(const C& call, const void* pointer, const char* argument) const {
    cudaPointerAttributes attributes{};
    check_cuda(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
    if (attributes.type == cudaMemoryTypeManaged) return Kind::managed;
    if (attributes.type != cudaMemoryTypeDevice) return Kind::host;
    if (attributes.device != gpu_.device()) [[unlikely]]
      refuse_foreign(call.call(), argument, attributes.device);
    if (!lanes_.is_one() && lanes_.staging() == nullptr)
      require_shared_pool(call.call(), argument, pool_of(pointer));
    return Kind::device;
  }

  [[noreturn]] void refuse_foreign(const Call& call, const char* argument, int device) const {
    throw Error(
        call.text(),
        text({argument, " is memory of GPU ", device, ", and this rank's GPU is ", gpu_.device()}),
        "allocate it while the rank's GPU is the current one, or by the communicator's "
        "allocate",
        rank_);
  }

  void require_shared_pool(const Call& call, const char* argument, cudaMemPool_t pool) const {
    if (pool == nullptr) return;
    for (const Lane& lane : lanes_.all()) {
      cudaMemLocation location{};
      location.type = cudaMemLocationTypeDevice;
      location.id = device_of(lane.gpu);
      if (location.id == gpu_.device()) continue;
      cudaMemAccessFlags access{};
      check_cuda(cudaMemPoolGetAccess(&access, pool, &location), "cudaMemPoolGetAccess");
      if (access == cudaMemAccessFlagsProtReadWrite) continue;
      throw Error(
          call.text(),
          text({argument, " is memory of a pool that GPU ", location.id, " has no access to"}),
          "grant it by cudaMemPoolSetAccess, or give memory of the default pool, of "
          "cudaMalloc or of the communicator's allocate",
          rank_);
    }
  }

  const Lanes& lanes_;
  const Gpu& gpu_;
  Rank rank_;
};

}  // namespace lockstep::detail::threads
