// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Collectives through NCCL that move elements as they are, by bytes: NCCL has not all types.

#include <nccl.h>

#include <cstddef>
#include <span>
#include <type_traits>

#include "lockstep/comm/backends/nccl/transfer.cuh"
#include "lockstep/core/strong.hpp"

namespace lockstep::nccl {

template <class T>
Ticket broadcast(Engine& engine, std::span<T> data, Rank root) {
  const Call call = describe<T>(engine, CollectiveKind::broadcast, data, root);
  return transfer<T>(engine, call, data, data, [&](const T* in, T* out) {
    engine.link().nccl("ncclBroadcast", [&](ncclComm_t comm) {
      return ncclBroadcast(in, out, data.size_bytes(), ncclUint8, static_cast<int>(root.value()),
                           comm, engine.stream());
    });
  });
}

template <class In, class T>
Ticket all_gather(Engine& engine, std::span<In> in, std::span<T> out) {
  const Call call = describe<T>(engine, CollectiveKind::all_gather, in);
  check_size(engine, call, out.size(), in.size() * engine.world());
  return transfer<T>(engine, call, in, out, [&](const T* from, T* to) {
    engine.link().nccl("ncclAllGather", [&](ncclComm_t comm) {
      return ncclAllGather(from, to, in.size_bytes(), ncclUint8, comm, engine.stream());
    });
  });
}

template <class In, class T>
Ticket gather(Engine& engine, std::span<In> in, std::span<T> out, Rank root) {
  const Call call = describe<T>(engine, CollectiveKind::gather, in, root);
  const bool takes = engine.rank() == root;
  if (takes) check_size(engine, call, out.size(), in.size() * engine.world());
  const std::span<T> result = takes ? out : std::span<T>();
  return transfer<T>(engine, call, in, result, [&](const T* from, T* to) {
    const std::size_t bytes = in.size_bytes();
    grouped(engine, "ncclGroupEnd (gather)", [&](ncclComm_t comm) {
      if (!takes)
        return ncclSend(from, bytes, ncclUint8, static_cast<int>(root.value()), comm,
                        engine.stream());
      ncclResult_t result = ncclSuccess;
      for (std::size_t w = 0; w < engine.world() && result == ncclSuccess; ++w) {
        if (Rank{w} == root) continue;
        result = ncclRecv(to + w * in.size(), bytes, ncclUint8, static_cast<int>(w), comm,
                          engine.stream());
      }
      return result;
    });
    if (takes)
      copy(to + root.value() * in.size(), from, bytes, cudaMemcpyDeviceToDevice, engine.stream());
  });
}

template <class In, class T>
Ticket scatter(Engine& engine, std::span<In> in, std::span<T> out, Rank root) {
  const Call call = describe<T>(engine, CollectiveKind::scatter, out, root);
  const bool gives = engine.rank() == root;
  if (gives) check_size(engine, call, in.size(), out.size() * engine.world());
  const std::span<const T> source = gives ? std::span<const T>(in) : std::span<const T>();
  return transfer<T>(engine, call, source, out, [&](const T* from, T* to) {
    const std::size_t bytes = out.size_bytes();
    grouped(engine, "ncclGroupEnd (scatter)", [&](ncclComm_t comm) {
      if (!gives)
        return ncclRecv(to, bytes, ncclUint8, static_cast<int>(root.value()), comm,
                        engine.stream());
      ncclResult_t result = ncclSuccess;
      for (std::size_t w = 0; w < engine.world() && result == ncclSuccess; ++w) {
        if (Rank{w} == root) continue;
        result = ncclSend(from + w * out.size(), bytes, ncclUint8, static_cast<int>(w), comm,
                          engine.stream());
      }
      return result;
    });
    if (gives)
      copy(to, from + root.value() * out.size(), bytes, cudaMemcpyDeviceToDevice, engine.stream());
  });
}

template <class In, class T>
Ticket all_to_all(Engine& engine, std::span<In> in, std::span<T> out) {
  const Call call = describe<T>(engine, CollectiveKind::all_to_all, in);
  check_size(engine, call, in.size(), out.size());
  check_size(engine, call, in.size() % engine.world(), 0);
  const std::size_t each = in.size() / engine.world();
  return transfer<T>(engine, call, in, out, [&](const T* from, T* to) {
    const auto piece = [&](std::size_t w) { return w * each; };
    exchange(engine, "ncclGroupEnd (all_to_all)", from, to, each, piece, piece);
  });
}

template <class U>
Ticket send(Engine& engine, std::span<U> data, Rank to) {
  using T = std::remove_const_t<U>;
  const Call call = describe<T>(engine, CollectiveKind::send, data, to);
  return transfer<T>(engine, call, data, std::span<T>(), [&](const T* in, T*) {
    engine.link().nccl("ncclSend", [&](ncclComm_t comm) {
      return ncclSend(in, data.size_bytes(), ncclUint8, static_cast<int>(to.value()), comm,
                      engine.stream());
    });
  });
}

template <class T>
Ticket receive(Engine& engine, std::span<T> data, Rank from) {
  const Call call = describe<T>(engine, CollectiveKind::send, data, engine.rank());
  return transfer<T>(engine, call, std::span<const T>(), data, [&](const T*, T* out) {
    engine.link().nccl("ncclRecv", [&](ncclComm_t comm) {
      return ncclRecv(out, data.size_bytes(), ncclUint8, static_cast<int>(from.value()), comm,
                      engine.stream());
    });
  });
}

}  // namespace lockstep::nccl
