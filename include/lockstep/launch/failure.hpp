// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Why a rank ended with an exception, as it tells its launcher.
///
/// A rank does not print this itself. The process that watches all ranks knows which failure was
/// the first, and prints that one first and once.

#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

struct Failure {
  /// As in `Error`. For other exceptions all but the problem are empty.
  std::string operation;
  std::string problem;
  std::string advice;
  std::optional<Rank> rank;
  /// The failure was caused by another rank.
  bool consequence = false;

  static Failure of(const std::exception_ptr& thrown);

  /// The text for users. `self` is the rank that failed, for an error that names none.
  std::string text(std::optional<Rank> self) const;

  std::string bytes() const;

  /// Nothing if the rank ended before it had written all of it.
  static std::optional<Failure> from_bytes(std::string_view bytes);
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/launch/failure.ipp"
#endif
