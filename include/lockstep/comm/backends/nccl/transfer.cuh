// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What every collective through NCCL is made of: a call that is checked, arguments that the
/// GPU can reach, and calls of NCCL that belong together.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <concepts>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/call_arguments.hpp"
#include "lockstep/comm/backends/nccl/engine.cuh"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/memory.cuh"

namespace lockstep::nccl {

inline CallArguments arguments(const Engine& engine) {
  return {engine.rank(), WorldSize{engine.world()}};
}

/// The call as the others will compare it. Arguments that cannot be right fail here and now.
template <class T, class U>
Call describe(const Engine& engine, CollectiveKind kind, std::span<U> data, Rank root = Rank{0},
              std::string_view operation = "") {
  static_assert(std::same_as<std::remove_const_t<U>, T>,
                "lockstep: a collective's arguments have one element type");
  arguments(engine).check<T>(kind, root);
  return make_call<T>(kind, data.size(), false, root.value(), operation);
}

inline void check_size(const Engine& engine, const Call& call, std::size_t have, std::size_t want) {
  arguments(engine).check_size(call, have, want);
}

template <class T>
bool needs_staging(std::span<T> values) {
  return !values.empty() && is_host_memory(values.data());
}

inline void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                 cudaStream_t stream) {
  if (bytes != 0 && to != from)
    check_cuda(cudaMemcpyAsync(to, from, bytes, kind, stream), "cudaMemcpyAsync");
}

/// A call with host memory: staged, and waited for.
template <class T, class Body>
Ticket transfer_staged(Engine& engine, const Call& call, std::span<const T> in, std::span<T> out,
                       const Body& body) {
  engine.require_no_capture(call, "give it device memory, or do it outside of the step");
  const bool in_staged = needs_staging(in);
  const bool out_staged = needs_staging(out);
  const std::size_t out_begin = in_staged ? align_up(in.size_bytes()) : 0;
  engine.staging().reserve(out_begin + out.size_bytes());
  std::byte* const host = engine.staging().host();
  std::byte* const device = engine.staging().device();
  const T* const from = in_staged ? reinterpret_cast<const T*>(device) : in.data();
  T* const to = out_staged ? reinterpret_cast<T*>(device + out_begin) : out.data();
  if (in_staged) std::memcpy(host, in.data(), in.size_bytes());
  const Ticket ticket = engine.post(call, [&] {
    if (in_staged) copy(device, host, in.size_bytes(), cudaMemcpyHostToDevice, engine.stream());
    body(from, to);
    if (out_staged)
      copy(host + out_begin, to, out.size_bytes(), cudaMemcpyDeviceToHost, engine.stream());
  });
  engine.wait(ticket);
  if (out_staged) std::memcpy(out.data(), host + out_begin, out.size_bytes());
  return ticket;
}

/// A call whose work `body(in, out)` puts on the engine's stream. In and out may be the same, and
/// either may be empty where this rank does not use it. **Host** blocks only for host memory.
template <class T, class Body>
Ticket transfer(Engine& engine, const Call& call, std::span<const T> in, std::span<T> out,
                const Body& body) {
  if (call.count == 0) return engine.post(call, [] {});
  if (needs_staging(in) || needs_staging(out)) return transfer_staged(engine, call, in, out, body);
  return engine.post(call, [&] { body(in.data(), out.data()); });
}

/// Sends and receives that NCCL does at the same time: `calls(comm)` makes them.
template <class F>
void grouped(Engine& engine, const char* name, const F& calls) {
  engine.link().nccl(name, [&](ncclComm_t comm) {
    const ncclResult_t started = ncclGroupStart();
    if (started != ncclSuccess) return started;
    const ncclResult_t called = calls(comm);
    const ncclResult_t ended = ncclGroupEnd();
    return called == ncclSuccess || called == ncclInProgress ? ended : called;
  });
}

/// Sends `count` elements of every rank's `in` to every rank: those at `send_at(w)` to rank w,
/// which end up at `receive_at(v)` of its `out`, v being the sender.
template <class T, class SendAt, class ReceiveAt>
void exchange(Engine& engine, const char* name, const T* in, T* out, std::size_t count,
              const SendAt& send_at, const ReceiveAt& receive_at) {
  const std::size_t bytes = count * sizeof(T);
  const std::size_t me = engine.rank().value();
  grouped(engine, name, [&](ncclComm_t comm) {
    ncclResult_t result = ncclSuccess;
    const auto note = [&](ncclResult_t called) {
      if (result == ncclSuccess) result = called;
    };
    for (std::size_t w = 0; w < engine.world(); ++w) {
      if (w == me) continue;
      const int peer = static_cast<int>(w);
      note(ncclSend(in + send_at(w), bytes, ncclUint8, peer, comm, engine.stream()));
      note(ncclRecv(out + receive_at(w), bytes, ncclUint8, peer, comm, engine.stream()));
    }
    return result;
  });
  copy(out + receive_at(me), in + send_at(me), bytes, cudaMemcpyDeviceToDevice, engine.stream());
}

}  // namespace lockstep::nccl
