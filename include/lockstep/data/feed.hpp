// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Sends batches from ranks that read them to ranks that do not: one to all, or one to each.
///
/// Where storage is slow or far, a few ranks read and feed the others. Batches may differ in rows
/// and width from one call to the next: sizes travel first. An empty batch is allowed, and a good
/// way to say that there are no more. Other data of a batch, such as the name of its file, can be
/// sent with comm/objects.hpp.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/data/labelled_batch.hpp"

namespace lockstep {

namespace detail {

/// Calls `move` with every part of a batch that is not empty.
void each_part(auto& batch, const auto& move) {
  if (batch.size() == 0) return;
  if (batch.width != 0) move(std::span(batch.inputs));
  move(std::span(batch.labels));
  move(std::span(batch.weights));
}

}  // namespace detail

/// `batch` = root's batch, on all. Memory is kept: a batch that was once as large allocates
/// nothing. **Ranks** all. **Host** blocks.
template <Communicator C, class X, class Y>
void broadcast_batch(C& comm, LabelledBatch<X, Y>& batch, Rank root) {
  std::uint64_t shape[] = {batch.size(), batch.width};
  comm.broadcast(shape, root);
  if (comm.rank() != root) batch.resize(shape[0], shape[1]);
  detail::each_part(batch, [&](auto part) { comm.broadcast(part, root); });
}

/// Root has a batch for every rank, each of its own size; `mine` is this rank's. On other ranks
/// `batches` is not used. **Ranks** all. **Host** blocks.
template <Communicator C, class X, class Y>
void scatter_batches(C& comm, std::span<const LabelledBatch<X, Y>> batches,
                     LabelledBatch<X, Y>& mine, Rank root) {
  const std::size_t world = comm.world_size().value();
  std::vector<std::uint64_t> shapes;
  if (comm.rank() == root) {
    if (batches.size() != world) {
      detail::fail("scatter_batches", {batches.size(), " batches for ", world, " ranks"},
                   "give root one batch for every rank; it may be empty", comm.rank());
    }
    for (const auto& batch : batches) shapes.insert(shapes.end(), {batch.size(), batch.width});
  }
  std::uint64_t shape[2] = {};
  comm.scatter(shapes, shape, root);
  if (comm.rank() != root) {
    mine.resize(shape[0], shape[1]);
    detail::each_part(mine, [&](auto part) { comm.receive(part, root); });
    return;
  }
  for (std::size_t w = 0; w < world; ++w) {
    if (Rank{w} == root) {
      mine = batches[w];
    } else {
      detail::each_part(batches[w], [&](auto part) { comm.send(part, Rank{w}); });
    }
  }
}

template <Communicator C, class X, class Y>
void scatter_batches(C& comm, const std::vector<LabelledBatch<X, Y>>& batches,
                     LabelledBatch<X, Y>& mine, Rank root) {
  scatter_batches(comm, std::span(batches), mine, root);
}

}  // namespace lockstep
