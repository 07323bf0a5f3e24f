// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file All-reduce through shared memory, of data where it lies or through the staging area.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/shm/control.hpp"
#include "lockstep/comm/shm/peers.hpp"
#include "lockstep/comm/shm/reduce.hpp"
#include "lockstep/core/reduce_op.hpp"

namespace lockstep::shm {

template <class T, class Op>
constexpr Call all_reduce_call(std::size_t count, bool staged) {
  static_assert(ReduceOp<Op, T>,
                "lockstep: this reduce operation is not defined for these elements");
  return make_call<T>(CollectiveKind::all_reduce, count, staged, 0, Op::name);
}

/// Everybody's data, looked up once.
template <class T, class Source>
std::vector<T*> targets(std::size_t world, const Source& source) {
  std::vector<T*> all(world);
  for (std::size_t w = 0; w < world; ++w) all[w] = source(w);
  return all;
}

/// Each rank loads its slice of everybody's data, combines it in registers and stores it to all.
template <std::size_t Ranks, class T, class Op>
void push_slice(const std::vector<T*>& all, std::size_t me, std::size_t count, const Op& op) {
  const auto [begin, end] = slice<T>(count, me, all.size());
  push<Ranks, T>(all, begin, end, op);
}

/// Of data that is small or in an arena at `offset`: a call under way.
template <std::size_t Ranks, bool Helped, class T, class Op>
auto start_all_reduce(Peers<Ranks, Helped> peers, std::span<T> values, Op op,
                      std::uint64_t offset) {
  const bool small = is_small<T>(values.size());
  const auto work = [peers, values, op, small](std::uint64_t ticket) {
    if (small) {
      combine_blocks<Ranks, T>(peers.world(), 0, values.size(), op,
                               peers.template small_source<T>(ticket),
                               [&](std::size_t i, std::span<const T> results) {
                                 std::copy(results.begin(), results.end(), &values[i]);
                               });
    } else {
      push_slice<Ranks>(targets<T>(peers.world(), peers.template arena_source<T>(ticket)),
                        peers.me(), values.size(), op);
    }
  };
  return peers.post(all_reduce_call<T, Op>(values.size(), false),
                    small ? std::span<const T>(values) : std::span<const T>(), !small, work,
                    offset);
}

/// Of private memory: as much at a time as the staging area holds.
template <std::size_t Ranks, bool Helped, class T, class Op>
void all_reduce_staged(Peers<Ranks, Helped> peers, std::span<T> values, const Op& op) {
  const Call call = all_reduce_call<T, Op>(values.size(), true);
  constexpr std::size_t most = staging_bytes / sizeof(T);
  const auto all = targets<T>(peers.world(), peers.template staging_source<T>());
  T* const staging = all[peers.me()];
  for (std::size_t begin = 0; begin < values.size(); begin += most) {
    const std::size_t n = std::min(most, values.size() - begin);
    copy<T>(values.data() + begin, staging, n);
    peers
        .post(call, std::span<const T>(), true,
              [&](std::uint64_t) { push_slice<Ranks>(all, peers.me(), n, op); })
        .wait();
    copy<T>(staging, values.data() + begin, n);
  }
}

template <std::size_t Ranks, bool Helped, class T, class Op>
void all_reduce(Peers<Ranks, Helped> peers, std::span<T> values, const Op& op) {
  if (const auto offset = peers.location(values)) {
    start_all_reduce(peers, values, op, *offset).wait();
  } else {
    all_reduce_staged(peers, values, op);
  }
}

/// Staged data cannot be worked on in the background: it is reduced at once, and the call that is
/// handed out is of nothing.
template <std::size_t Ranks, bool Helped, class T, class Op>
auto all_reduce_async(Peers<Ranks, Helped> peers, std::span<T> values, const Op& op) {
  const auto offset = peers.location(values);
  if (!offset) all_reduce_staged(peers, values, op);
  return start_all_reduce(peers, offset ? values : values.first(0), op, offset.value_or(0));
}

}  // namespace lockstep::shm
