// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everybody's pieces, put together through shared memory: all_gather and gather.

#include <cstddef>
#include <span>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/shm/peers.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::shm {

/// Where `takes`, out = every rank's in, one behind the other; elsewhere out is not used.
template <std::size_t Ranks, bool Helped, class In, class T>
void gather_where(bool takes, const Call& call, Peers<Ranks, Helped> peers, std::span<In> in,
                  std::span<T> out) {
  if (takes) peers.check_size(call, out.size(), in.size() * peers.world());
  peers.exchange(call, std::span<const T>(in), 1, in.size(),
                 [&](const auto& source, std::size_t, std::size_t begin, std::size_t n) {
                   for (std::size_t w = 0; takes && w < peers.world(); ++w) {
                     copy(source(w), out.data() + w * in.size() + begin, n);
                   }
                 });
}

template <std::size_t Ranks, bool Helped, class In, class T>
void all_gather(Peers<Ranks, Helped> peers, std::span<In> in, std::span<T> out) {
  gather_where(true, peers.template describe<T>(CollectiveKind::all_gather, in), peers, in, out);
}

template <std::size_t Ranks, bool Helped, class In, class T>
void gather(Peers<Ranks, Helped> peers, std::span<In> in, std::span<T> out, Rank root) {
  gather_where(peers.rank() == root, peers.template describe<T>(CollectiveKind::gather, in, root),
               peers, in, out);
}

}  // namespace lockstep::shm
