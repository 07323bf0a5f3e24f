// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Whether a call's memory is the host's or a GPU's, and copies in either. Code of the host
/// only, for files that nvcc does not compile.

#include <cuda_runtime_api.h>

#include <span>

#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/combine.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/memory.cuh"

namespace lockstep::detail {

/// Where the arguments of a call are.
struct CallMemory {
  bool on_host = true;      // the host works on them; an empty call needs no GPU either
  bool is_managed = false;  // host code may read a result as soon as the call is over
};
enum class MemoryKind { host, managed, device };

/// Looks at each argument of a call by `look(pointer, argument's name)`. Arguments in host memory
/// and in device memory are an error. Managed memory is either.
template <class C, class Look>
CallMemory memory_of(const C& call, Rank rank, const Look& look) {
  using enum MemoryKind;
  const auto summary = [](MemoryKind a, MemoryKind b) {
    return CallMemory{a == host || b == host, a == managed || b == managed};
  };
  if (C::is_in_place || call.in.empty() || call.out.empty()) {
    const std::span<const typename C::element> values = call.out.empty() ? call.in : call.out;
    if (values.empty()) return {};
    const char* const name = C::is_in_place ? "its data" : call.out.empty() ? "in" : "out";
    const MemoryKind kind = look(values.data(), name);
    return summary(kind, kind);
  }
  const MemoryKind in = look(call.in.data(), "in");
  const MemoryKind out = look(call.out.data(), "out");
  if (in == out || in == managed || out == managed) return summary(in, out);
  throw Error(call.call().text(),
              in == host ? "in is host memory and out is device memory"
                         : "in is device memory and out is host memory",
              "give both arguments in the same memory", rank);
}

/// Is the call's memory the host's?
template <class C>
bool is_host_call(const C& call, Rank rank) {
  const auto look = [](const void* data, const char*) {
    return is_host_memory(data) ? MemoryKind::host : MemoryKind::device;
  };
  return memory_of(call, rank, look).on_host;
}

/// Copies of elements in host memory, or in device memory on a stream.
class StreamCopies {
 public:
  explicit StreamCopies(cudaStream_t stream) : stream_(stream) {}

  static bool is_device(const void* data) { return data != nullptr && !is_host_memory(data); }

  template <class T>
  void copy(std::span<const T> from, std::span<T> to) const {
    if (from.empty() || from.data() == to.data()) return;
    if (!is_device(to.data())) return HostPasses::copy(from, to);
    check_cuda(cudaMemcpyAsync(to.data(), from.data(), from.size_bytes(), cudaMemcpyDeviceToDevice,
                               stream_),
               "cudaMemcpyAsync");
  }

 protected:
  cudaStream_t stream_;
};

}  // namespace lockstep::detail
