// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Sends batches from ranks that read them to ranks that do not: one to all, or one to each.
///
/// Where storage is slow or far, a few ranks read and feed the others. A job does so by itself,
/// while it computes, with the policy `Feed<LeaderOfGroup>`; these functions are for hand-written
/// loops. Batches are of any type that says how it is packed (parcel.hpp), and may differ in size
/// from one call to the next: sizes travel first. An empty batch is allowed, and a good way to say
/// that there are no more.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/data/labelled_batch.hpp"
#include "lockstep/data/parcel.hpp"

namespace lockstep {

namespace detail {

/// The memory of this thread's parcels, which later calls use again.
struct ParcelMemory {
  ParcelWriter writer;
  ParcelBuffer buffer;

  static ParcelMemory& of_thread() {
    static thread_local ParcelMemory memory;
    return memory;
  }
};

}  // namespace detail

/// `batch` = root's batch, on all. Memory is kept: a batch that was once as large allocates
/// nothing. **Ranks** all. **Host** blocks.
template <Communicator C, class Batch>
void broadcast_batch(C& comm, Batch& batch, Rank root) {
  auto& [writer, buffer] = detail::ParcelMemory::of_thread();
  std::uint64_t size[] = {0};
  if (comm.rank() == root) {
    writer.clear();
    writer.put(batch);
    size[0] = writer.size();
  }
  comm.broadcast(size, root);
  const std::span<std::uint8_t> parcel =
      comm.rank() == root ? writer.written() : buffer.room(size[0]);
  comm.broadcast(parcel, root);
  if (comm.rank() != root) detail::ParcelReader(parcel).take(batch);
}

/// Root has a batch for every rank, each of its own size; `mine` is this rank's. On other ranks
/// `batches` is not used. **Ranks** all. **Host** blocks.
template <Communicator C, class Batch>
void scatter_batches(C& comm, std::span<const Batch> batches, Batch& mine, Rank root) {
  auto& [writer, buffer] = detail::ParcelMemory::of_thread();
  const std::size_t world = comm.world_size().value();
  std::vector<std::uint64_t> sizes;
  if (comm.rank() == root) {
    if (batches.size() != world) {
      detail::fail("scatter_batches", {batches.size(), " batches for ", world, " ranks"},
                   "give root one batch for every rank; it may be empty", comm.rank());
    }
    writer.clear();
    for (std::size_t w = 0; w < world; ++w) {
      const std::size_t before = writer.size();
      if (Rank{w} != root) writer.put(batches[w]);
      sizes.push_back(writer.size() - before);
    }
  }
  std::uint64_t size[] = {0};
  comm.scatter(sizes, size, root);
  if (comm.rank() != root) {
    const std::span<std::uint8_t> parcel = buffer.room(size[0]);
    comm.receive(parcel, root);
    detail::ParcelReader(parcel).take(mine);
    return;
  }
  std::size_t begin = 0;
  for (std::size_t w = 0; w < world; ++w) {
    if (Rank{w} == root) {
      mine = batches[w];
    } else {
      comm.send(writer.written().subspan(begin, sizes[w]), Rank{w});
    }
    begin += sizes[w];
  }
}

template <Communicator C, class Batch>
void scatter_batches(C& comm, const std::vector<Batch>& batches, Batch& mine, Rank root) {
  scatter_batches(comm, std::span(batches), mine, root);
}

}  // namespace lockstep
