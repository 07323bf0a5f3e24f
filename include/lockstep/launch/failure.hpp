// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Why a rank ended with an exception, as it tells its launcher.
///
/// A rank does not print this itself: the process that watches all ranks knows which failure was
/// the first, and shows that one, once, ahead of those it has caused.

#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

struct Failure {
  /// As in `Error`; all but the problem are empty for an exception that is none.
  std::string operation;
  std::string problem;
  std::string advice;
  std::optional<Rank> rank;
  /// Another rank knows the reason.
  bool consequence = false;

  static Failure of(const std::exception_ptr& thrown);

  /// What a user reads. `self` is the rank that failed, where the error names none.
  std::string text(std::optional<Rank> self) const;

  std::string bytes() const;

  /// Nothing where a rank ended before it had said all of it.
  static std::optional<Failure> from_bytes(std::string_view bytes);
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/launch/failure.ipp"
#endif
