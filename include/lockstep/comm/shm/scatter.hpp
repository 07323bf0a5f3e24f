// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A piece for every rank, dealt out through shared memory: scatter, reduce_scatter and
/// all_to_all.

#include <algorithm>
#include <cstddef>
#include <span>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/shm/peers.hpp"
#include "lockstep/comm/shm/reduce.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::shm {

template <std::size_t Ranks, bool Helped, class In, class T>
void scatter(Peers<Ranks, Helped> peers, std::span<In> in, std::span<T> out, Rank root) {
  Call call = peers.template describe<T>(CollectiveKind::scatter, out, root);
  const std::size_t all = out.size() * peers.world();
  call.staged = !is_small<T>(all);  // who has no `in` cannot know where root's lies
  const bool gives = peers.rank() == root;
  if (gives) peers.check_size(call, in.size(), all);
  peers.exchange(call, gives ? std::span<const T>(in) : std::span<const T>(), peers.world(),
                 out.size(),
                 [&](const auto& source, std::size_t stride, std::size_t begin, std::size_t n) {
                   copy(source(root.value()) + peers.me() * stride, out.data() + begin, n);
                 });
}

template <std::size_t Ranks, bool Helped, class In, class T, class Op>
void reduce_scatter(Peers<Ranks, Helped> peers, std::span<In> in, std::span<T> out, const Op& op) {
  Call call = peers.template describe<T>(CollectiveKind::reduce_scatter, in);
  call.with(Op::name);
  peers.check_size(call, in.size(), out.size() * peers.world());
  peers.exchange(call, std::span<const T>(in), peers.world(), out.size(),
                 [&](const auto& source, std::size_t stride, std::size_t begin, std::size_t n) {
                   combine_blocks<Ranks, T>(
                       peers.world(), 0, n, op,
                       [&](std::size_t w) { return source(w) + peers.me() * stride; },
                       [&](std::size_t i, std::span<const T> results) {
                         std::copy(results.begin(), results.end(), &out[begin + i]);
                       });
                 });
}

template <std::size_t Ranks, bool Helped, class In, class T>
void all_to_all(Peers<Ranks, Helped> peers, std::span<In> in, std::span<T> out) {
  const Call call = peers.template describe<T>(CollectiveKind::all_to_all, in);
  peers.check_size(call, in.size(), out.size());
  peers.check_size(call, in.size() % peers.world(), 0);
  const std::size_t each = in.size() / peers.world();
  peers.exchange(call, std::span<const T>(in), peers.world(), each,
                 [&](const auto& source, std::size_t stride, std::size_t begin, std::size_t n) {
                   for (std::size_t w = 0; w < peers.world(); ++w) {
                     copy(source(w) + peers.me() * stride, out.data() + w * each + begin, n);
                   }
                 });
}

}  // namespace lockstep::shm
