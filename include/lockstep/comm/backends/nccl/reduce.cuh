// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Reductions through NCCL: by its own operations, or of gathered pieces where it has none.

#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <span>

#include "lockstep/comm/backends/nccl/transfer.cuh"
#include "lockstep/comm/backends/nccl/types.cuh"
#include "lockstep/comm/combine.cuh"
#include "lockstep/core/reduce_op.hpp"

namespace lockstep::nccl {

/// Reduces `count` elements in pieces that fit into the scratch memory: `gather(scratch, begin, n)`
/// brings every rank's, then they are combined into `out`, if this rank wants them.
template <class T, class Op, class Gather>
void reduce_pieces(Engine& engine, const Call& call, T* out, std::size_t count, const Op& op,
                   const Gather& gather) {
  T* const scratch = reinterpret_cast<T*>(engine.scratch(call));
  const std::size_t most = Engine::scratch_bytes / (engine.world() * sizeof(T));
  for (std::size_t begin = 0; begin < count; begin += most) {
    const std::size_t n = std::min(most, count - begin);
    gather(scratch, begin, n);
    if (out == nullptr) continue;
    reduce_gathered<T>(scratch, engine.world(), out + begin, n, op, engine.stream());
  }
}

/// The same with everybody's elements at the same place.
template <class T, class Op>
void reduce_everywhere(Engine& engine, const Call& call, const T* in, T* out, std::size_t count,
                       const Op& op) {
  reduce_pieces(engine, call, out, count, op, [&](T* scratch, std::size_t begin, std::size_t n) {
    engine.link().nccl("ncclAllGather", [&](ncclComm_t comm) {
      return ncclAllGather(in + begin, scratch, n * sizeof(T), ncclUint8, comm, engine.stream());
    });
  });
}

/// In a world of one NCCL 2.28 leaves out the last elements of an average whose count is no
/// multiple of eight. There, reductions are made of what was gathered.
inline bool is_alone(const Engine& engine) { return engine.world() == 1; }

template <class T, class Op>
Ticket all_reduce(Engine& engine, std::span<T> data, const Op& op) {
  static_assert(ReduceOp<Op, T>,
                "lockstep: this reduce operation is not defined for these elements");
  const Call call = describe<T>(engine, CollectiveKind::all_reduce, data, Rank{0}, Op::name);
  return transfer<T>(engine, call, data, data, [&](const T* in, T* out) {
    if constexpr (reduces<Op, T>) {
      if (!is_alone(engine)) {
        engine.link().nccl("ncclAllReduce", [&](ncclComm_t comm) {
          return with_operation<T>(op, comm, [&](ncclRedOp_t operation) {
            return ncclAllReduce(in, out, data.size(), data_type<T>(), operation, comm,
                                 engine.stream());
          });
        });
        return;
      }
    }
    reduce_everywhere(engine, call, in, out, data.size(), op);
  });
}

template <class T, class Op>
Ticket reduce(Engine& engine, std::span<T> data, Rank root, const Op& op) {
  static_assert(ReduceOp<Op, T>,
                "lockstep: this reduce operation is not defined for these elements");
  const Call call = describe<T>(engine, CollectiveKind::reduce, data, root, Op::name);
  const std::span<T> result = engine.rank() == root ? data : std::span<T>();
  return transfer<T>(engine, call, data, result, [&](const T* in, T* out) {
    if constexpr (reduces<Op, T>) {
      if (!is_alone(engine)) {
        engine.link().nccl("ncclReduce", [&](ncclComm_t comm) {
          return with_operation<T>(op, comm, [&](ncclRedOp_t operation) {
            return ncclReduce(in, out, data.size(), data_type<T>(), operation,
                              static_cast<int>(root.value()), comm, engine.stream());
          });
        });
        return;
      }
    }
    reduce_everywhere(engine, call, in, out, data.size(), op);
  });
}

template <class In, class T, class Op>
Ticket reduce_scatter(Engine& engine, std::span<In> in, std::span<T> out, const Op& op) {
  static_assert(ReduceOp<Op, T>,
                "lockstep: this reduce operation is not defined for these elements");
  const Call call = describe<T>(engine, CollectiveKind::reduce_scatter, in, Rank{0}, Op::name);
  check_size(engine, call, in.size(), out.size() * engine.world());
  return transfer<T>(engine, call, in, out, [&](const T* from, T* to) {
    if constexpr (reduces<Op, T>) {
      if (!is_alone(engine)) {
        engine.link().nccl("ncclReduceScatter", [&](ncclComm_t comm) {
          return with_operation<T>(op, comm, [&](ncclRedOp_t operation) {
            return ncclReduceScatter(from, to, out.size(), data_type<T>(), operation, comm,
                                     engine.stream());
          });
        });
        return;
      }
    }
    if (is_alone(engine)) {
      reduce_everywhere(engine, call, from, to, out.size(), op);
      return;
    }
    reduce_pieces(engine, call, to, out.size(), op,
                  [&](T* scratch, std::size_t begin, std::size_t n) {
                    exchange(
                        engine, "ncclGroupEnd (reduce_scatter)", from, scratch, n,
                        [&](std::size_t w) { return w * out.size() + begin; },
                        [&](std::size_t w) { return w * n; });
                  });
  });
}

}  // namespace lockstep::nccl
