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
#include "lockstep/core/text.hpp"

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
  /// At the time limit, ranks that wait for another rank have this long to tell each other so.
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
      engine_.fail_as_consequence(engine_.explain(now->call.text(), lost, suspicion.value_or("")));
      return;
    }
    if (Clock::now() - now->since >= engine_.timeout()) engine_.fail(time_over(*now));
  }

  /// The ranks whose connection has ended although this call needs it. A rank that has said
  /// farewell has done its part in all earlier calls.
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
