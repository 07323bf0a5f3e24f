// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Whether a failure ends a scope, as destructors want to know it.

#include <exception>

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

/// A member of objects whose destructors tell others of a failure.
class EndOfScope {
 public:
  /// Does an exception that is a failure end the scope that this object was made in?
  bool is_failure() const {
    return std::uncaught_exceptions() > at_first_ && harmless_exceptions() <= 0;
  }

 private:
  int at_first_ = std::uncaught_exceptions();
};

}  // namespace lockstep::detail
