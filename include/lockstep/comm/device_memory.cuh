// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Whether a call's memory is the host's or a GPU's, and copies in either.

#include <cuda_runtime_api.h>

#include <span>

#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/passes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/memory.cuh"

namespace lockstep::detail {

/// Is the call's memory the host's? An empty call needs no GPU either. Arguments in two kinds of
/// memory are an error.
template <class C>
bool is_host_call(const C& call, Rank rank) {
  const auto is_host = [](auto values) { return is_host_memory(values.data()); };
  if (call.in.empty() || C::is_in_place) {
    const auto values = call.out.empty() ? std::span<const typename C::element>(call.in) : call.out;
    return values.empty() || is_host(values);
  }
  const bool host = is_host(call.in);
  if (call.out.empty() || host == is_host(call.out)) return host;
  throw Error(call.call().text(),
              host ? "in is host memory and out is device memory"
                   : "in is device memory and out is host memory",
              "give both arguments in the same memory", rank);
}

/// Copies of elements in host memory, or in device memory on a stream. For communicators that leave
/// all other passes to those that they are made of.
class StreamCopies {
 public:
  explicit StreamCopies(cudaStream_t stream) : stream_(stream) {}

  static bool is_device(const void* data) { return data != nullptr && !is_host_memory(data); }

  template <class T>
  void copy(std::span<const T> from, std::span<T> to) const {
    if (from.empty() || from.data() == to.data()) return;
    if (!is_device(to.data())) return copy_elements(from.data(), to.data(), from.size());
    check_cuda(cudaMemcpyAsync(to.data(), from.data(), from.size_bytes(), cudaMemcpyDeviceToDevice,
                               stream_),
               "cudaMemcpyAsync");
  }

 private:
  cudaStream_t stream_;
};

}  // namespace lockstep::detail
