// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The library's exception: which rank, doing what, what went wrong, what to do about it.

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/core/strong.hpp"

namespace lockstep {

/// Every error that reaches a user: `lockstep: rank 2, all_reduce: the counts differ, 7 here and 8
/// on rank 0; call it with ...`. Whoever knows the rank gives it.
class Error : public std::runtime_error {
 public:
  Error(std::string operation, std::string problem, std::string advice,
        std::optional<Rank> rank = std::nullopt)
      : std::runtime_error(sentence(operation, problem, advice, rank)),
        operation_(std::move(operation)),
        problem_(std::move(problem)),
        advice_(std::move(advice)),
        rank_(rank) {}

  /// The same error, on a rank that is now known.
  Error on(Rank rank) const {
    Error error(operation_, problem_, advice_, rank);
    error.consequence_ = consequence_;
    return error;
  }

  /// The same error, thrown only because another rank has failed: that rank knows the reason.
  Error as_consequence() const {
    Error error = *this;
    error.consequence_ = true;
    return error;
  }

  /// What `what()` says, without a virtual call.
  const char* text() const { return std::runtime_error::what(); }

  const std::string& operation() const { return operation_; }
  const std::string& problem() const { return problem_; }
  const std::string& advice() const { return advice_; }
  std::optional<Rank> rank() const { return rank_; }
  bool is_consequence() const { return consequence_; }

 private:
  static std::string sentence(const std::string& operation, const std::string& problem,
                              const std::string& advice, std::optional<Rank> rank) {
    std::string text = "lockstep: ";
    if (rank) text += "rank " + std::to_string(rank->value()) + ", ";
    return text + operation + ": " + problem + "; " + advice;
  }

  std::string operation_;
  std::string problem_;
  std::string advice_;
  std::optional<Rank> rank_;
  bool consequence_ = false;
};

/// Throws unless `ok`. The advice says what the user should do; the place is the caller's.
constexpr void check(bool ok, std::string_view advice, const char* file = __builtin_FILE(),
                     int line = __builtin_LINE()) {
  if (ok) [[likely]]
    return;
  throw Error(std::string(file) + ":" + std::to_string(line), "a condition does not hold",
              std::string(advice));
}

}  // namespace lockstep
