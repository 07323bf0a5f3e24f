// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The first calls of an NCCL communicator. NCCL connects ranks, and allocates, at the first
/// call of each kind: so these are made when ranks join, where no rank waits for another that
/// allocates.

#include <nccl.h>

#include <cstddef>

#include "lockstep/comm/backends/nccl/engine.cuh"

namespace lockstep::detail::nccl {

/// Says that the first calls are not made at once.
struct WarmUpLater {};

/// **Ranks** all. **Host** blocks until the calls are over.
inline void warm_up(Engine& engine) {
  std::byte* const data = engine.scratch();
  const cudaStream_t stream = engine.stream();
  const std::size_t rank = engine.rank().value();
  // NCCL has one way for few bytes and another for many. Pieces are of whole packets, or those of
  // some ranks would not be aligned.
  constexpr std::size_t packet = 16;
  for (const std::size_t each :
       {packet, Engine::scratch_bytes / 4 / engine.world() / packet * packet}) {
    const std::size_t bytes = each * engine.world();
    engine.make_first_call([&](ncclComm_t comm) {
      return ncclAllReduce(data, data, bytes / sizeof(float), ncclFloat32, ncclSum, comm, stream);
    });
    engine.make_first_call([&](ncclComm_t comm) {
      return ncclBroadcast(data, data, bytes, ncclUint8, 0, comm, stream);
    });
    engine.make_first_call([&](ncclComm_t comm) {
      return ncclAllGather(data + rank * each, data, each, ncclUint8, comm, stream);
    });
    engine.make_first_call([&](ncclComm_t comm) {
      return ncclReduceScatter(data, data + rank * each, each / sizeof(float), ncclFloat32, ncclSum,
                               comm, stream);
    });
  }
}

/// The same for messages, between every two ranks: where many ranks are, they need much memory.
inline void warm_up_messages(Engine& engine) {
  std::byte* const data = engine.scratch();
  engine.make_first_call([&](ncclComm_t comm) {
    ncclResult_t result = ncclGroupStart();
    const auto note = [&](ncclResult_t made) {
      if (made != ncclSuccess && made != ncclInProgress) result = made;
    };
    for (int peer = 0; peer < static_cast<int>(engine.world()); ++peer) {
      if (peer == static_cast<int>(engine.rank().value())) continue;
      note(ncclSend(data, 1, ncclUint8, peer, comm, engine.stream()));
      note(ncclRecv(data + 1 + peer, 1, ncclUint8, peer, comm, engine.stream()));
    }
    const ncclResult_t ended = ncclGroupEnd();
    return result == ncclSuccess ? ended : result;
  });
}

}  // namespace lockstep::detail::nccl
