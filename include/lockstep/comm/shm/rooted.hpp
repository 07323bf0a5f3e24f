// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Whole data to or from one rank, through shared memory: reduce and broadcast.

#include <algorithm>
#include <cstddef>
#include <span>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/shm/peers.hpp"
#include "lockstep/comm/shm/reduce.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::shm {

template <std::size_t Ranks, bool Helped, class T, class Op>
void reduce(Peers<Ranks, Helped> peers, std::span<T> values, Rank root, const Op& op) {
  Call call = peers.template describe<T>(CollectiveKind::reduce, values, root);
  call.with(Op::name);
  peers.exchange(call, std::span<const T>(values), 1, values.size(),
                 [&](const auto& source, std::size_t, std::size_t begin, std::size_t n) {
                   if (peers.rank() != root) return;
                   combine_blocks<Ranks, T>(peers.world(), 0, n, op, source,
                                            [&](std::size_t i, std::span<const T> results) {
                                              std::copy(results.begin(), results.end(),
                                                        &values[begin + i]);
                                            });
                 });
}

template <std::size_t Ranks, bool Helped, class T>
void broadcast(Peers<Ranks, Helped> peers, std::span<T> values, Rank root) {
  const Call call = peers.template describe<T>(CollectiveKind::broadcast, values, root);
  peers.exchange(call, std::span<const T>(values), 1, values.size(),
                 [&](const auto& source, std::size_t, std::size_t begin, std::size_t n) {
                   if (peers.rank() != root) copy(source(root.value()), values.data() + begin, n);
                 });
}

}  // namespace lockstep::shm
