// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a batch that is fed to other ranks says how it is packed
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/data/feed.hpp"

using namespace lockstep;

struct Batch {
  const float* inputs = nullptr;
  std::vector<float> rows;
#ifdef REJECT
  friend void pack(auto& archive, Batch& batch) { archive(batch.inputs, batch.rows); }
#else
  friend void pack(auto& archive, Batch& batch) { archive(batch.rows); }
#endif
};

inline void feed(LoopbackCommunicator& comm, Batch& batch) {
  broadcast_batch(comm, batch, Rank{0});
}
