// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A rank's end of a communicator: an engine with its threads, from beginning to end.

#include <exception>
#include <thread>
#include <utility>

#include "lockstep/comm/backends/gloo/engine.hpp"
#include "lockstep/comm/backends/gloo/watch.hpp"
#include "lockstep/comm/fault/sentences.hpp"
#include "lockstep/comm/waiting/queue.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/launch/failure.hpp"

namespace lockstep::detail::over_gloo {

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
