// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Collectives of ranks that see each other's memory: each reads what it needs of all ranks'
/// `in` and writes its own `out`.

#include <cstddef>
#include <span>

#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/combine.hpp"
#include "lockstep/comm/passes.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

/// Takes elements [begin, begin + n) of the pieces that are for rank `me`. Those elements of piece
/// p of rank w lie at `source(w) + p * stride`. `Ranks` is the world's size where the compiler
/// knows it.
template <std::size_t Ranks, class C, class Source>
void take_from_all(const C& call, Rank me, std::size_t world, const Source& source,
                   std::size_t stride, std::size_t begin, std::size_t n) {
  using T = typename C::element;
  if (call.out.empty()) return;
  T* const out = call.out.data() + begin;
  const std::size_t own_piece = C::deals_pieces ? me.value() * stride : 0;
  if constexpr (!std::is_same_v<typename C::operation, NoOperation>) {
    combine_blocks<Ranks, T>(
        world, 0, n, call.op, [&](std::size_t w) { return source(w) + own_piece; },
        [&](std::size_t i, std::span<const T> results) {
          copy_elements(results.data(), out + i, results.size());
        });
  } else if constexpr (C::collects_pieces) {
    for (std::size_t w = 0; w < world; ++w)
      copy_elements<T>(source(w) + own_piece, out + w * call.count, n);
  } else {
    copy_elements<T>(source(call.root.value()) + own_piece, out, n);
  }
}

}  // namespace lockstep::detail
