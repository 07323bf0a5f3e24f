// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Whether an exception ends a scope, as destructors want to know it, and failures that are
/// noticed in a destructor, from which nothing may be thrown: whoever runs the program is told, and
/// its exit status says so.

#include <exception>

#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

/// How many exceptions that are no failures this thread has under way.
inline int& harmless_exceptions() {
  thread_local int count = 0;
  return count;
}

/// A member of exceptions that are no failures. It lives as long as they do: from the throw to the
/// end of the handler.
class HarmlessMark {
 public:
  HarmlessMark() noexcept { ++harmless_exceptions(); }
  HarmlessMark(const HarmlessMark&) noexcept { ++harmless_exceptions(); }
  HarmlessMark& operator=(const HarmlessMark&) noexcept = default;
  ~HarmlessMark() { --harmless_exceptions(); }
};

/// A member of objects whose destructors must know why they run.
class EndOfScope {
 public:
  /// Does an exception end the scope that this object was made in?
  bool is_exception() const { return std::uncaught_exceptions() > at_first_; }
  /// Does an exception that is a failure end the scope that this object was made in?
  bool is_failure() const { return is_exception() && harmless_exceptions() <= 0; }

 private:
  int at_first_ = std::uncaught_exceptions();
};

/// A variable has a value while this lives, and its former one afterwards.
template <class T>
class [[nodiscard]] ValueWhile {
 public:
  ValueWhile(T& variable, std::type_identity_t<T> value)
      : variable_(variable), before_(std::exchange(variable, value)) {}
  ~ValueWhile() { variable_ = before_; }
  ValueWhile(const ValueWhile&) = delete;
  ValueWhile& operator=(const ValueWhile&) = delete;

 private:
  T& variable_;
  T before_;
};

/// A failure that came too late to be thrown, and the rank that had it.
struct LateFailure {
  std::exception_ptr thrown;
  std::optional<Rank> rank;
};

/// Tells of a failure that nobody is left to throw to. While a `LateFailures` exists it gets the
/// failure; otherwise the failure is printed on stderr.
void tell_late_failure(const LateFailure& failure) noexcept;

/// Collects the late failures of this process while it exists, as `launch` does for its ranks. What
/// nobody has taken at its end is printed on stderr.
class LateFailures {
 public:
  LateFailures();
  ~LateFailures();
  LateFailures(const LateFailures&) = delete;
  LateFailures& operator=(const LateFailures&) = delete;

  /// The first failure that has not been taken yet.
  std::optional<LateFailure> take();
};

}  // namespace lockstep::detail
