// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The thread that looks after a communicator: whether its calls end in time and whether all
/// ranks are still there.

#include <chrono>
#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/gloo/engine.hpp"
#include "lockstep/comm/call/messages.hpp"
#include "lockstep/comm/call/queue.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/launch/outcome.hpp"

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

class Endpoint {
 public:
  explicit Endpoint(JoinOptions joined) : engine_(std::move(joined)) {
    try {
      watch_ = Thread(
          ThreadName{"lockstep gloo", "the thread that watches Gloo's calls"},
          [this] { Watch(engine_).run(); },
          [this](const std::exception_ptr& thrown) {
            engine_.fail(Error("Backend<Gloo>", Failure::of(thrown).problem, "start the job again",
                               engine_.rank()));
          });
    } catch (const Error& error) {  // the others have joined already, and must hear why this ends
      engine_.fail(error.on(engine_.rank()));
      throw;
    }
  }
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  ~Endpoint() {
    if (scope_.is_failure()) give_up();
    queue_.drain();
    if (!is_broken()) engine_.roll().say_farewell(Greeting::State::leaves, farewell_limit);
    engine_.ledger().stop_watch();
    watch_.join();  // the watching thread uses the engine
  }

  /// An exception has ended this rank's part: ends what is under way, and tells the others.
  void give_up() {
    if (is_broken()) return;
    engine_.fail(gave_up("Gloo's communicator '" + engine_.joined().name + "'", ended_by_exception,
                         engine_.rank()),
                 ended_by_exception);
  }

  Engine& engine() { return engine_; }
  Queue& queue() { return queue_; }
  bool is_broken() { return engine_.ledger().is_broken(); }

 private:
  /// When this rank closes its sockets, TCP may lose messages that are still on their way. So the
  /// rank waits until the others say farewell or make their next call, at most this long.
  static constexpr Milliseconds farewell_limit{2'000};

  EndOfScope scope_;
  Engine engine_;
  Queue queue_;
  Thread watch_;
};

}  // namespace lockstep::detail::over_gloo
