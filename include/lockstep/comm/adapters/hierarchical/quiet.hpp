// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file When ranks of one process may allocate memory of their GPUs.
///
/// To allocate or free may wait for kernels of other GPUs of the process. Those may wait for other
/// hosts, of which one may be about to allocate too: all would wait until the time limit. So the
/// ranks of a host allocate together, while nothing of theirs is under way.

#include <cstddef>
#include <type_traits>
#include <utility>

#include "lockstep/comm/passes.hpp"

namespace lockstep::detail {

/// Is the memory of this communicator's passes the host's? That can be allocated at any time.
template <class Comm>
inline constexpr bool works_on_host =
    std::is_same_v<std::remove_cvref_t<decltype(passes_of(std::declval<Comm&>()))>, HostPasses>;

/// Calls `allocate()` while no GPU of this host is at work for `inside`. **Ranks** all of `inside`.
/// **Host** blocks.
template <class Inside, class F>
void allocate_quietly(Inside& inside, const F& allocate) {
  if constexpr (works_on_host<Inside>) {
    allocate();
  } else {
    inside.barrier();  // its streams are empty
    allocate();
    inside.barrier();
  }
}

/// Calls `f()` on one rank of this host after the other. A first call of NCCL connects hosts, which
/// allocates: while it does, no other GPU of the host may be at work. Ranks that connect with each
/// other have the same turn on all hosts; one whose turn is `turns` has none. **Ranks** all of
/// `inside`. **Host** blocks.
template <class Inside, class F>
void by_turns(Inside& inside, std::size_t turn, std::size_t turns, const F& f) {
  inside.barrier();
  for (std::size_t t = 0; t < turns; ++t) {
    if (t == turn) f();
    inside.barrier();
  }
}

}  // namespace lockstep::detail
