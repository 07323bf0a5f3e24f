// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `sentences.hpp`.

#include "lockstep/comm/fault/sentences.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::string rank_text(Rank rank) { return text({"rank ", rank}); }

/// Is this the call of a step, in the words of `Call::text`? A rank that makes none while another
/// does has mostly had its last batch.
LOCKSTEP_INLINE bool is_of_step(std::string_view call) { return call.starts_with("step"); }

LOCKSTEP_INLINE Error ranks_disagree(std::uint64_t number, std::string_view call_of_rank0,
                                     Rank other, std::string_view call_of_other, Rank me) {
  const std::string who = call_of_rank0 == call_of_other
                              ? text({"ranks disagree: rank 0 and rank ", other, " called ",
                                      call_of_other, " with different arguments"})
                              : text({"ranks disagree: rank 0 called ", call_of_rank0, " and rank ",
                                      other, " called ", call_of_other});
  const bool one_steps = is_of_step(call_of_rank0) != is_of_step(call_of_other);
  return {text({"call ", number}), who,
          one_steps ? "let every rank make the same calls, with as many batches, or add "
                      "UnevenInputs<Join>, with which ranks may have different numbers of batches"
                    : "let every rank make the same calls in the same order",
          me};
}

LOCKSTEP_INLINE Error messages_differ(const Call& received, Rank from, std::string_view sent,
                                      Rank me) {
  return {received.text(), text({"rank ", from, " sends ", sent}),
          "send and receive the same type and count, in the same order", me};
}

LOCKSTEP_INLINE Error rank_failed(std::string_view operation, Rank who, std::string_view words,
                                  Rank me) {
  return Error(operation, text({"rank ", who, " failed: ", words}), "look at that rank first", me)
      .as_consequence();
}

LOCKSTEP_INLINE Error rank_vanished(std::string_view operation, std::string_view how, Rank me) {
  return Error(operation, how, "look for the reason in its output", me).as_consequence();
}

LOCKSTEP_INLINE Error rank_left(std::string_view operation, Rank who, Rank me) {
  return {operation, text({"rank ", who, " closed its communicator without this call"}),
          is_of_step(operation)
              ? "let every rank make the same calls, with as many batches, or add "
                "UnevenInputs<Join>, with which ranks may have different numbers of batches"
              : "let every rank make the same calls",
          me};
}

LOCKSTEP_INLINE Error time_is_over(std::string_view operation, std::chrono::milliseconds limit,
                                   std::string_view missing, Rank me) {
  return {operation, text({"waited ", limit.count(), " ms for ", missing}),
          "see whether it hangs, or raise the time limit", me};
}

LOCKSTEP_INLINE std::string lagging_rank(Rank who, bool has_joined, std::uint64_t made,
                                         std::uint64_t expected) {
  if (!has_joined) return text({"rank ", who, " (never joined)"});
  if (made >= expected) return rank_text(who);  // it has not sent, or not received, a message
  return text({"rank ", who, " (made ", made, " of ", expected, " calls)"});
}

LOCKSTEP_INLINE Error gave_up(std::string_view communicator, std::string_view reason, Rank me) {
  return {communicator, text({"this rank gave it up: ", reason}), "start the job again", me};
}

}  // namespace lockstep::detail
