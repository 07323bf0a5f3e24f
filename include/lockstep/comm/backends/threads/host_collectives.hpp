// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Collectives of host memory among the ranks of one process: one thread does the work for
/// all, straight from everybody's memory to everybody's memory.
///
/// Meant for what a job says to itself (agreement, metrics), not for gradients: those are the
/// GPU's.

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "lockstep/comm/backends/shm/peers.hpp"
#include "lockstep/comm/combine.hpp"
#include "lockstep/comm/backends/threads/meeting.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::threads::on_host {

template <class T>
const T* in(const Offer& offer) {
  return static_cast<const T*>(offer.in);
}
template <class T>
T* out(const Offer& offer) {
  return static_cast<T*>(offer.out);
}

/// to = op over ranks of what lies `offset` behind each rank's in.
template <class T, class Op>
void combine(std::span<const Offer> ranks, std::size_t offset, T* to, std::size_t count,
             const Op& op) {
  shm::combine_blocks<dynamic, T>(
      ranks.size(), 0, count, op, [&](std::size_t w) { return in<T>(ranks[w]) + offset; },
      [&](std::size_t i, std::span<const T> results) {
        std::copy(results.begin(), results.end(), to + i);
      });
}

template <class T, class Op>
void all_reduce(std::span<const Offer> ranks, std::size_t count, const Op& op) {
  std::vector<T*> targets(ranks.size());
  for (std::size_t w = 0; w < ranks.size(); ++w) targets[w] = out<T>(ranks[w]);
  shm::push<dynamic, T>(targets, 0, count, op);
}

template <class T, class Op>
void reduce(std::span<const Offer> ranks, std::size_t count, Rank root, const Op& op) {
  combine(ranks, 0, out<T>(ranks[root.value()]), count, op);
}

/// `count` is of one piece, here and below.
template <class T, class Op>
void reduce_scatter(std::span<const Offer> ranks, std::size_t count, const Op& op) {
  for (std::size_t w = 0; w < ranks.size(); ++w) {
    combine(ranks, w * count, out<T>(ranks[w]), count, op);
  }
}

template <class T>
void broadcast(std::span<const Offer> ranks, std::size_t count, Rank root) {
  for (const Offer& rank : ranks) shm::copy(in<T>(ranks[root.value()]), out<T>(rank), count);
}

template <class T>
void gather(std::span<const Offer> ranks, std::size_t count, Rank root) {
  for (std::size_t w = 0; w < ranks.size(); ++w) {
    shm::copy(in<T>(ranks[w]), out<T>(ranks[root.value()]) + w * count, count);
  }
}

template <class T>
void all_gather(std::span<const Offer> ranks, std::size_t count) {
  for (std::size_t w = 0; w < ranks.size(); ++w) gather<T>(ranks, count, Rank{w});
}

template <class T>
void scatter(std::span<const Offer> ranks, std::size_t count, Rank root) {
  for (std::size_t w = 0; w < ranks.size(); ++w) {
    shm::copy(in<T>(ranks[root.value()]) + w * count, out<T>(ranks[w]), count);
  }
}

template <class T>
void all_to_all(std::span<const Offer> ranks, std::size_t count) {
  for (std::size_t from = 0; from < ranks.size(); ++from) {
    for (std::size_t to = 0; to < ranks.size(); ++to) {
      shm::copy(in<T>(ranks[from]) + to * count, out<T>(ranks[to]) + from * count, count);
    }
  }
}

}  // namespace lockstep::threads::on_host
