// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The errors that every backend can meet, in the same words.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/call.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/launch/names.hpp"

namespace lockstep::detail {

inline std::string rank_text(Rank rank) { return "rank " + std::to_string(rank.value()); }

/// Two ranks made different calls. All ranks name the same pair: rank 0 and the first that differs.
inline Error ranks_disagree(std::uint64_t number, const std::string& call_of_rank0, Rank other,
                            const std::string& call_of_other, Rank me) {
  return {"call " + std::to_string(number),
          "ranks disagree: rank 0 called " + call_of_rank0 + " and " + rank_text(other) +
              " called " + call_of_other,
          "let every rank make the same calls in the same order", me};
}

/// Compares what all ranks called: `call_of(w)` is rank w's description. The error, if they differ.
template <class CallOf>
std::optional<Error> find_disagreement(std::uint64_t number, std::size_t world,
                                       const CallOf& call_of, Rank me) {
  for (std::size_t w = 1; w < world; ++w) {
    if (call_of(w) == call_of(0)) continue;
    return ranks_disagree(number, call_of(0).text(), Rank{w}, call_of(w).text(), me);
  }
  return std::nullopt;
}

/// A sender and its receiver disagree about the message.
inline Error messages_differ(const Call& received, Rank from, const std::string& sent, Rank me) {
  return {received.text(), rank_text(from) + " sends " + sent,
          "send and receive the same type and count, in the same order", me};
}

/// Another rank has said why it gave up.
inline Error rank_failed(const std::string& operation, Rank who, const std::string& words,
                         Rank me) {
  return Error(operation, rank_text(who) + " failed: " + words, "look at that rank first", me)
      .as_consequence();
}

/// Another rank went without a word.
inline Error rank_vanished(const std::string& operation, const std::string& how, Rank me) {
  return Error(operation, how, "look for the reason in its output", me).as_consequence();
}

inline Error rank_left(const std::string& operation, Rank who, Rank me) {
  return {operation, rank_text(who) + " closed its communicator without this call",
          "let every rank make the same calls", me};
}

/// `missing`: who was waited for, in words.
inline Error time_is_over(const std::string& operation, std::chrono::milliseconds limit,
                          const std::string& missing, Rank me) {
  return {operation, "waited " + std::to_string(limit.count()) + " ms for " + missing,
          "see whether it hangs, or raise the time limit", me};
}

/// A rank that lags behind, and how far it has come: `rank 2 (made 3 of 5 calls)`.
inline std::string lagging_rank(Rank who, bool has_joined, std::uint64_t made,
                                std::uint64_t expected) {
  return rank_text(who) + (has_joined ? " (made " + std::to_string(made) + " of " +
                                            std::to_string(expected) + " calls)"
                                      : " (never joined)");
}

/// This rank gave its communicator up, or an exception ended its part.
inline Error gave_up(const std::string& communicator, const std::string& reason, Rank me) {
  return {communicator, "this rank gave it up: " + reason, "start the job again", me};
}

inline constexpr const char* ended_by_exception = "it ended with an exception";

}  // namespace lockstep::detail
