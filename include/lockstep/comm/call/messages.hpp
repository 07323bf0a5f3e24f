// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The errors that every backend can meet, in the same words.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/comm/collective.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

std::string rank_text(Rank rank);

/// Two ranks made different calls. All ranks name the same pair: rank 0 and the first that differs.
Error ranks_disagree(std::uint64_t number, std::string_view call_of_rank0, Rank other,
                     std::string_view call_of_other, Rank me);

/// Compares all ranks' calls, `call_of(w)` being rank w's. Returns the error if they differ.
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
Error messages_differ(const Call& received, Rank from, std::string_view sent, Rank me);

/// Another rank has said why it gave up.
Error rank_failed(std::string_view operation, Rank who, std::string_view words, Rank me);

/// Another rank ended without a word.
Error rank_vanished(std::string_view operation, std::string_view how, Rank me);

Error rank_left(std::string_view operation, Rank who, Rank me);

/// A wait has reached its limit. `missing` are the ranks that were waited for, in words.
Error time_is_over(std::string_view operation, std::chrono::milliseconds limit,
                   std::string_view missing, Rank me);

/// A rank that lags behind, and how far it has come: `rank 2 (made 3 of 5 calls)`.
std::string lagging_rank(Rank who, bool has_joined, std::uint64_t made, std::uint64_t expected);

/// This rank has given up its communicator, or an exception has ended its part.
Error gave_up(std::string_view communicator, std::string_view reason, Rank me);

inline constexpr const char* ended_by_exception = "it ended with an exception";

}  // namespace lockstep::detail
