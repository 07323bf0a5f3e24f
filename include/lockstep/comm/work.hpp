// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The handle of an asynchronous call: one contract, whatever the backend.

#include <utility>

#include "lockstep/core/scope_guard.hpp"

namespace lockstep {

/// A call under way, on data that belongs to the call until it is over. The handle stays where it
/// was made. Its end waits for the call, and never throws: if the call fails then, or if an
/// exception drives the handle out of its scope before the call was waited for, the communicator
/// keeps the fault, tells the other ranks, and throws it from its next call.
///
/// `Pending` is the backend's part: `test()`, `wait()` and, for the second case, `leave()`, which
/// returns when nothing uses the call's data any more.
template <class Pending>
class [[nodiscard("the handle's end waits for the call")]] Work {
 public:
  template <class... Arguments>
  explicit Work(std::in_place_t, Arguments&&... arguments)
      : pending_{std::forward<Arguments>(arguments)...} {}
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  ~Work() {
    if (waited_) return;
    if (scope_.is_exception()) {
      leave();
      return;
    }
    try {
      pending_.wait();
    } catch (...) {
      waited_ = true;  // the communicator throws the fault from its next call
    }
  }

  /// Is the call over? Carries it on as far as that is possible without waiting. **Host** does not
  /// block. Throws if the call has failed.
  bool test() { return pending_.test(); }

  /// **Host** blocks until the result is here, or on a GPU not at all. **Stream** what the compute
  /// stream is given from here on sees the result. Throws if the call has failed.
  void wait() {
    waited_ = true;
    pending_.wait();
  }

  /// Drops the handle of a call that was part of a failed capture and never happened.
  void forget() { waited_ = true; }

 private:
  /// An exception has driven the handle out of its scope.
  [[gnu::cold, gnu::noinline]] void leave() { pending_.leave(); }

  detail::EndOfScope scope_;
  bool waited_ = false;
  Pending pending_;
};

namespace detail {
/// A call that was over before its handle was made.
struct NothingPending {
  static constexpr bool test() { return true; }
  static constexpr void wait() {}
  static constexpr void leave() {}
};
}  // namespace detail

}  // namespace lockstep
