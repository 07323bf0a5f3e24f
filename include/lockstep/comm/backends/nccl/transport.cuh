// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file NCCL's collectives as executions of calls, on the engine's stream, in device memory.

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <span>

#include "lockstep/comm/backends/nccl/engine.cuh"
#include "lockstep/comm/backends/nccl/types.cuh"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/combine.cuh"
#include "lockstep/comm/generic.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/gpu.cuh"

namespace lockstep::detail::nccl {

/// NCCL's own collectives, where it has the operation. Other calls have their generic form, made of
/// gathered elements or of messages that travel together. Elements that are only moved travel as
/// bytes, because NCCL does not have all types.
class Transport {
 public:
  explicit Transport(Engine& engine) : engine_(engine) {}

  Rank rank() const { return engine_.rank(); }
  WorldSize world_size() const { return WorldSize{engine_.world()}; }

  template <class T, class Op>
    requires reduces<Op, T>
  void execute(const calls::AllReduce<T, Op>& call) {
    reduce("ncclAllReduce", call, call.out, [&](ncclRedOp_t operation, ncclComm_t comm) {
      return ncclAllReduce(call.in.data(), call.out.data(), call.count, data_type<T>(), operation,
                           comm, stream());
    });
  }

  template <class T, class Op>
    requires reduces<Op, T>
  void execute(const calls::Reduce<T, Op>& call) {
    const bool takes = rank() == call.root;
    reduce("ncclReduce", call, takes ? call.out : std::span<T>(),
           [&](ncclRedOp_t operation, ncclComm_t comm) {
             return ncclReduce(call.in.data(), call.out.data(), call.count, data_type<T>(),
                               operation, peer(call.root), comm, stream());
           });
  }

  template <class T, class Op>
    requires reduces<Op, T>
  void execute(const calls::ReduceScatter<T, Op>& call) {
    reduce("ncclReduceScatter", call, call.out, [&](ncclRedOp_t operation, ncclComm_t comm) {
      return ncclReduceScatter(call.in.data(), call.out.data(), call.count, data_type<T>(),
                               operation, comm, stream());
    });
  }

  template <class T>
  void execute(const calls::Broadcast<T>& call) {
    const std::span<T> data = call.data();
    make("ncclBroadcast", [&](ncclComm_t comm) {
      return ncclBroadcast(data.data(), data.data(), data.size_bytes(), ncclUint8, peer(call.root),
                           comm, stream());
    });
  }

  template <class T>
  void execute(const calls::AllGather<T>& call) {
    make("ncclAllGather", [&](ncclComm_t comm) {
      return ncclAllGather(call.in.data(), call.out.data(), call.in.size_bytes(), ncclUint8, comm,
                           stream());
    });
  }

  template <class T>
  void execute(const calls::Send<T>& message) {
    make("ncclSend", [&](ncclComm_t comm) {
      return ncclSend(message.in.data(), message.in.size_bytes(), ncclUint8, peer(message.root),
                      comm, stream());
    });
  }

  template <class T>
  void execute(const calls::Receive<T>& message) {
    make("ncclRecv", [&](ncclComm_t comm) {
      return ncclRecv(message.out.data(), message.out.size_bytes(), ncclUint8, peer(message.root),
                      comm, stream());
    });
  }

  /// The messages of `f()` travel at the same time.
  template <class F>
  void grouped(const F& f) {
    engine_.link().nccl("ncclGroupEnd", [&](ncclComm_t comm) {
      const ncclResult_t started = ncclGroupStart();
      if (started != ncclSuccess) return started;
      group_ = {comm, ncclSuccess};
      try {
        f();
      } catch (...) {
        group_.comm = nullptr;
        static_cast<void>(ncclGroupEnd());
        throw;
      }
      group_.comm = nullptr;
      const ncclResult_t ended = ncclGroupEnd();
      return group_.result == ncclSuccess ? ended : group_.result;
    });
  }

  /// Passes on the engine's stream, with the engine's scratch memory.
  struct Passes : StreamPasses {
    explicit Passes(Transport& transport)
        : StreamPasses(transport.stream()), transport(transport) {}

    template <class T>
    std::span<T> scratch(const T*, std::size_t wanted, std::size_t) const {
      return {reinterpret_cast<T*>(transport.engine_.scratch()),
              std::min(wanted, Engine::scratch_bytes / sizeof(T))};
    }
    /// Kernels are launched from the GPU of their stream.
    template <class T, class Op>
    void combine(std::span<const T> gathered, std::span<T> out, const Op& op) const {
      const OnGpu current(transport.engine_.gpu().index());
      StreamPasses::combine(gathered, out, op);
    }

    Transport& transport;
  };
  Passes passes() { return Passes(*this); }

 private:
  static int peer(Rank rank) { return static_cast<int>(rank.value()); }
  cudaStream_t stream() const { return engine_.stream(); }

  /// A reduction by NCCL, and the pass that its factors need. In a world of one NCCL 2.28 leaves
  /// out the last elements of a multiplied sum whose count is no multiple of eight: there,
  /// reductions have their generic form.
  template <class C, class T, class F>
  void reduce(const char* name, const C& call, std::span<T> result, const F& f) {
    using Op = typename C::operation;
    if (engine_.world() == 1) return execute_generically(*this, call);
    const Factors factors = factors_of<T>(call.op, engine_.world());
    make(name, [&](ncclComm_t comm) {
      return with_operation<Op, T>(factors.before, comm,
                                   [&](ncclRedOp_t operation) { return f(operation, comm); });
    });
    if constexpr (FloatingElement<T>) {
      if (factors.needs_pass())
        passes().combine(std::span<const T>(result), result, Rescaled{factors});
    }
  }

  /// One call of NCCL, alone or as part of a group.
  template <class F>
  void make(const char* name, const F& call) {
    if (group_.comm == nullptr) {
      engine_.link().nccl(name, call);
    } else if (const ncclResult_t result = call(group_.comm);
               result != ncclSuccess && result != ncclInProgress) {
      group_.result = result;
    }
  }

  struct Group {
    ncclComm_t comm = nullptr;  // nothing outside of a group
    ncclResult_t result = ncclSuccess;
  };

  Engine& engine_;
  Group group_;
};

}  // namespace lockstep::detail::nccl
