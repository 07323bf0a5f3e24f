// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A reduction whose results never leave the cache: each rank consumes its own slice of them.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/shm/all_reduce.hpp"
#include "lockstep/comm/shm/peers.hpp"
#include "lockstep/comm/shm/reduce.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/reduce_op.hpp"

namespace lockstep::shm {

/// Combines this rank's slice of everybody's data and hands it to `consume(begin, results)`, block
/// by block. Returns when all ranks have consumed theirs.
template <std::size_t Ranks, bool Helped, class T, class Op, class Consume>
void reduce_slice(Peers<Ranks, Helped> peers, std::span<T> values, const Op& op,
                  const Consume& consume) {
  static_assert(ReduceOp<Op, T>,
                "lockstep: this reduce operation is not defined for these elements");
  const Call call = make_call<T>(CollectiveKind::reduce_scatter, values.size(), false, 0, Op::name);
  const auto offset = peers.arena_offset(values);
  if (!offset) {
    throw Error(call.text(), "the data is not in memory from allocate",
                "reduce slices of arenas only", peers.rank());
  }
  const auto work = [&](std::uint64_t ticket) {
    const auto [begin, end] = slice<T>(values.size(), peers.me(), peers.world());
    const auto all = targets<T>(peers.world(), peers.template arena_source<T>(ticket));
    consume_blocks<Ranks, T>(all, begin, end, op, consume);
  };
  peers.post(call, std::span<const T>(), true, work, *offset).wait();
}

}  // namespace lockstep::shm
