// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Arguments that cannot be right fail on the rank that gives them, before a call is made:
/// the same sentences for every backend.

#include <cstddef>
#include <string>

#include "lockstep/comm/call.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep {

/// What a rank checks of its own arguments.
struct CallArguments {
  Rank rank;
  WorldSize world;

  /// Elements of T, with this root.
  template <class T>
  void check(CollectiveKind kind, Rank root) const {
    static_assert(Element<T>,
                  "lockstep: collectives move double, float, Half, BFloat16 and integers");
    if (root.value() < world.value()) return;
    throw Error(std::string(collective_name(kind)),
                "root " + std::to_string(root.value()) + " is not in the world",
                "give a rank below " + std::to_string(world.value()), rank);
  }

  void check_size(const Call& call, std::size_t have, std::size_t want) const {
    if (have == want) return;
    throw Error(call.text(),
                "sizes do not fit: " + std::to_string(have) + " elements where " +
                    std::to_string(want) + " are needed",
                "one argument holds a piece for every rank, the other one piece", rank);
  }

  /// For messages: `peer` is another rank of this world.
  void check_peer(const char* operation, Rank peer) const {
    if (peer.value() < world.value() && peer != rank) return;
    throw Error(operation,
                "rank " + std::to_string(peer.value()) + " is not another rank of this world",
                "give one below " + std::to_string(world.value()), rank);
  }
};

}  // namespace lockstep
