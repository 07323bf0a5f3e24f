// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How a waiting rank finds out why its wait is in vain, where ranks can see each other's
/// state: another rank has ended, failed or left, or the time is over.

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/call/messages.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

/// The state of all ranks, as one of them sees it.
template <class P>
concept ObservablePeers = requires(const P& peers, std::size_t w) {
  { peers.rank() } -> std::same_as<Rank>;
  { peers.world() } -> std::same_as<std::size_t>;
  { peers.has_joined(w) } -> std::same_as<bool>;
  { peers.has_left(w) } -> std::same_as<bool>;      // it closed its communicator
  { peers.has_died(w) } -> std::same_as<bool>;      // its process ended without closing it
  { peers.words(w) } -> std::same_as<std::string>;  // why it gave up; empty if it has not said
  { peers.calls_made(w) } -> std::same_as<std::uint64_t>;
};

/// The error that ends the wait for a call, if there is one. All ranks name the same culprit: a
/// rank that ended, else one that gave up. `lacks(w)`: rank w has yet to do its part.
template <ObservablePeers P, class Lacks>
std::optional<Error> find_fault(const P& peers, const Call& call, const Lacks& lacks) {
  const std::size_t me = peers.rank().value();
  const auto first = [&](const auto& holds) {
    std::size_t w = 0;
    while (w < peers.world() && (w == me || !holds(w))) ++w;
    return w;
  };
  const std::size_t none = peers.world();
  if (const std::size_t w = first([&](std::size_t r) { return peers.has_died(r); }); w != none) {
    const std::string words = peers.words(w);
    return rank_vanished(call.text(),
                         text({"rank ", w, "'s process ended", words.empty() ? "" : ": ", words}),
                         peers.rank());
  }
  // A rank that an exception ended may have been ended by another's failure, of which it heard in a
  // group of fewer ranks. Whoever gives a reason comes before it, whatever their numbers.
  const auto has_said = [&](std::size_t r) { return !peers.words(r).empty(); };
  const auto has_reason = [&](std::size_t r) {
    return has_said(r) && peers.words(r) != ended_by_exception;
  };
  std::size_t who = first(has_reason);
  if (who == none) who = first(has_said);
  if (who != none) return rank_failed(call.text(), Rank{who}, peers.words(who), peers.rank());
  if (const std::size_t w = first([&](std::size_t r) { return peers.has_left(r) && lacks(r); });
      w != none) {
    return rank_left(call.text(), Rank{w}, peers.rank());
  }
  return std::nullopt;
}

/// The error of a wait that has lasted for the whole time limit.
template <ObservablePeers P, class Lacks>
Error find_missing(const P& peers, const Call& call, std::chrono::milliseconds limit,
                   const Lacks& lacks) {
  const std::uint64_t expected = peers.calls_made(peers.rank().value());
  std::string missing;
  for (std::size_t w = 0; w < peers.world(); ++w) {
    if (Rank{w} == peers.rank() || !lacks(w)) continue;
    if (!missing.empty()) missing += ", ";
    missing += lagging_rank(Rank{w}, peers.has_joined(w), peers.calls_made(w), expected);
  }
  return time_is_over(call.text(), limit, missing.empty() ? "the last rank" : missing,
                      peers.rank());
}

}  // namespace lockstep::detail
