// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Scope guards, and detection of stack unwinding.

#include <exception>

#include "lockstep/detail/core/standard.hpp"

namespace lockstep::detail {

/// The number of exceptions in flight on this thread that are no failures.
inline int& harmless_exceptions() {
  thread_local int count = 0;
  return count;
}

/// A member of exceptions that are no failures; counts from the throw to the end of the handler.
class HarmlessMark {
 public:
  HarmlessMark() noexcept { ++harmless_exceptions(); }
  HarmlessMark(const HarmlessMark&) noexcept { ++harmless_exceptions(); }
  HarmlessMark& operator=(const HarmlessMark&) noexcept = default;
  ~HarmlessMark() { --harmless_exceptions(); }
};

/// A member of objects whose destructors behave differently during stack unwinding.
class EndOfScope {
 public:
  /// Does an exception unwind the scope in which this object was constructed?
  bool is_exception() const { return std::uncaught_exceptions() > at_first_; }
  /// The same, for exceptions that are failures.
  bool is_failure() const { return is_exception() && harmless_exceptions() <= 0; }

 private:
  int at_first_ = std::uncaught_exceptions();
};

/// RAII: sets a variable, and restores its old value at the end of the scope.
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

}  // namespace lockstep::detail
