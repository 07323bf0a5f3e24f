// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Collectives of host memory among the ranks of one process: one thread does the work for
/// all ranks, directly in their memory.
///
/// Meant for agreement and metrics, not for gradients, which are in device memory.

#include <cstddef>
#include <span>
#include <vector>

#include "lockstep/comm/backends/threads/meeting.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/combine.hpp"
#include "lockstep/comm/shared_memory.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail::threads {

/// `call` is any rank's call; `ranks` has every rank's memory.
template <class C>
void work_for_all(const C& call, std::span<const Offer> ranks) {
  using T = typename C::element;
  if constexpr (C::kind == CollectiveKind::all_reduce) {
    std::vector<T*> targets(ranks.size());
    for (std::size_t w = 0; w < ranks.size(); ++w) targets[w] = static_cast<T*>(ranks[w].out);
    push<dynamic, T>(targets, 0, call.count, call.op);
  } else {
    const auto source = [&](std::size_t w) { return static_cast<const T*>(ranks[w].in); };
    const std::size_t length = call.count * (C::collects_pieces ? ranks.size() : 1);
    for (std::size_t w = 0; w < ranks.size(); ++w) {
      T* const out = static_cast<T*>(ranks[w].out);
      if (out == nullptr) continue;
      take_from_all<dynamic>(call.on({}, {out, length}, call.count), Rank{w}, ranks.size(), source,
                             call.count, 0, call.count);
    }
  }
}

}  // namespace lockstep::detail::threads
