// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The thread that looks after a communicator: whether its calls end in time and whether all
/// ranks are still there.

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/backends/gloo/engine.hpp"
#include "lockstep/comm/fault/sentences.hpp"
#include "lockstep/launch/names.hpp"

namespace lockstep::detail::over_gloo {

class Watch {
 public:
  explicit Watch(Engine& engine) : engine_(engine) {}

  void run() {
    while (engine_.ledger().watch_goes_on(tick)) {
      if (!engine_.ledger().is_broken()) look();
    }
  }

 private:
  static constexpr Milliseconds tick{50};
  /// At the time limit, ranks that wait for somebody else say so to each other. They began
  /// together.
  static constexpr Milliseconds last_words{400};

  void look() {
    const auto now = engine_.ledger().oldest();
    if (!now) return;
    if (const auto gone = left_without(*now)) {
      engine_.fail(rank_left(now->call.text(), *gone, engine_.rank()));
      return;
    }
    const auto suspicion = engine_.ledger().suspicion();
    std::vector<Rank> lost = lost_ranks(*now);
    if (suspicion && lost.empty()) {  // Gloo tells one buffer after the other
      std::this_thread::sleep_for(Milliseconds(20));
      lost = lost_ranks(*now);
    }
    if (suspicion || !lost.empty()) {
      engine_.fail_quietly(explain(*now, lost, suspicion.value_or("")));
      return;
    }
    if (Clock::now() - now->since >= engine_.timeout()) engine_.fail(time_over(*now));
  }

  /// Those whose connection has ended although this call needs it. Whoever has said farewell has
  /// done its part in all calls before.
  std::vector<Rank> lost_ranks(const Ongoing& now) {
    std::vector<Rank> lost;
    for (std::size_t w = 0; w < engine_.world(); ++w) {
      if (now.peer && *now.peer != Rank{w}) continue;
      if (engine_.connections()->is_lost(w) && !engine_.roll().has_left(w)) lost.emplace_back(w);
    }
    return lost;
  }

  std::optional<Rank> left_without(const Ongoing& now) {
    for (std::size_t w = 0; w < engine_.world(); ++w) {
      if (now.peer ? *now.peer != Rank{w} : now.agreed) continue;
      if (engine_.roll().has_left(w)) return Rank{w};
    }
    return std::nullopt;
  }

  /// What is known about a failure: another rank's words if there are any. A rank that is lost and
  /// has left none gets some, so that all ranks name the same one.
  Error explain(const Ongoing& now, const std::vector<Rank>& lost, const std::string& words) const {
    auto notice = engine_.tell([](const NoticeBoard& board) { return board.notice(); });
    if (notice && !notice->is_fault() && !lost.empty()) {
      notice = engine_.tell([who = lost.front()](const NoticeBoard& board) {
        return board.report(who, "its connection ended without a word");
      });
    }
    if (notice && notice->is_fault() && notice->rank != engine_.rank()) {
      return rank_failed(now.call.text(), notice->rank, notice->words, engine_.rank());
    }
    if (!lost.empty()) {
      return rank_vanished(now.call.text(),
                           "the connection to " + rank_text(lost.front()) + " ended",
                           engine_.rank());
    }
    return engine_.unexplained(now.call, words);
  }

  Error time_over(const Ongoing& now) {
    std::vector<Rank> missing;
    if (now.peer) {
      missing = {*now.peer};
    } else if (!now.agreed) {
      missing = engine_.roll().silent();
    } else {
      missing = engine_.roll().say_farewell(Greeting::State::gave_up, last_words);
    }
    std::vector<std::string> names;
    names.reserve(missing.size());
    for (Rank rank : missing) names.push_back(std::to_string(rank.value()));
    return time_is_over(
        now.call.text(), engine_.timeout(),
        missing.empty() ? std::string("the network; all ranks are there") : listed_ranks(names),
        engine_.rank());
  }

  Engine& engine_;
};

}  // namespace lockstep::detail::over_gloo
