// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a call is given: told to the other ranks, or an error here and now.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/gloo/engine.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::over_gloo {

/// The call as the others will compare it.
template <class U>
Call describe(const Engine& engine, CollectiveKind kind, std::span<U> data, Rank root,
              std::string_view operation = "") {
  using T = std::remove_const_t<U>;
  static_assert(Element<T>,
                "lockstep: collectives move double, float, Half, BFloat16 and integers");
  if (root.value() >= engine.world()) {
    throw Error(std::string(collective_name(kind)),
                "root " + std::to_string(root.value()) + " is not in the world",
                "give a rank below " + std::to_string(engine.world()), engine.rank());
  }
  return make_call<T>(kind, data.size(), false, root.value(), operation);
}

inline void check_size(const Engine& engine, const Call& call, std::size_t have, std::size_t want) {
  if (have == want) return;
  throw engine.error(call,
                     "sizes do not fit: " + std::to_string(have) + " elements where " +
                         std::to_string(want) + " are needed",
                     "one argument holds a piece for every rank, the other one piece");
}

inline void check_peer(const Engine& engine, const char* operation, Rank peer) {
  if (peer.value() < engine.world() && peer != engine.rank()) return;
  throw Error(operation,
              "rank " + std::to_string(peer.value()) + " is not another rank of this world",
              "give one below " + std::to_string(engine.world()), engine.rank());
}

}  // namespace lockstep::over_gloo
