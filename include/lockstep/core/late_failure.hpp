// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Failures that are noticed in a destructor, from which nothing may be thrown: whoever runs
/// the program is told, and its exit status says so.

#include <exception>
#include <optional>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

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

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/core/late_failure.ipp"
#endif
