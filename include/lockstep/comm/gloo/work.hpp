// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The handle of an asynchronous call through Gloo.

#include <exception>
#include <memory>
#include <utility>

#include "lockstep/comm/gloo/endpoint.hpp"

namespace lockstep::over_gloo {

/// A call under way. The handle stays where it was made and waits when it goes out of scope.
class Work {
 public:
  Work(Endpoint& endpoint, std::shared_ptr<Job> job)
      : endpoint_(endpoint), job_(std::move(job)), exceptions_(std::uncaught_exceptions()) {}
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  ~Work() noexcept(false) {
    if (waited_ || endpoint_.queue().is_over(*job_)) return;
    // Driven out by an exception, the data goes too, and nothing may use it any longer.
    if (std::uncaught_exceptions() != exceptions_) {
      endpoint_.give_up();
    } else if (!endpoint_.engine().ledger().is_broken()) {
      wait();
    }
    endpoint_.queue().drain();
  }

  /// Is the call over? **Host** does not block.
  bool test() { return endpoint_.queue().test(*job_); }

  /// **Host** blocks until the result is here.
  void wait() {
    waited_ = true;
    endpoint_.queue().wait(*job_);
  }

 private:
  Endpoint& endpoint_;
  std::shared_ptr<Job> job_;
  bool waited_ = false;
  int exceptions_;
};

}  // namespace lockstep::over_gloo
