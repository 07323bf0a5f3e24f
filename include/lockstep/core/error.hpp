// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The library's exception: which rank, doing what, what went wrong, what to do about it.

#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/text.hpp"

namespace lockstep {

/// Every error that reaches a user: `lockstep: rank 2, all_reduce: the counts differ, 7 here and 8
/// on rank 0; call it with ...`. The code that knows the rank gives it.
class Error : public std::runtime_error {
 public:
  [[gnu::cold]] Error(std::string_view operation, std::string_view problem, std::string_view advice,
                      std::optional<Rank> rank = std::nullopt);
  [[gnu::cold]] Error(const Error& other);
  ~Error() override;

  /// This error with its rank.
  Error on(Rank rank) const;

  /// This error, marked as the consequence of another rank's failure.
  Error as_consequence() const;

  /// The text of `what()`, without a virtual call.
  const char* text() const { return std::runtime_error::what(); }

  const std::string& operation() const { return operation_; }
  const std::string& problem() const { return problem_; }
  const std::string& advice() const { return advice_; }
  std::optional<Rank> rank() const { return rank_; }
  bool is_consequence() const { return consequence_; }

 private:
  std::string operation_;
  std::string problem_;
  std::string advice_;
  std::optional<Rank> rank_;
  bool consequence_ = false;
};

namespace detail {

/// Throws an `Error` whose problem is joined from words. It keeps the code of error paths small.
[[noreturn, gnu::cold]] void fail(std::string_view operation, std::initializer_list<Word> problem,
                                  std::string_view advice, std::optional<Rank> rank = std::nullopt);

[[noreturn, gnu::cold]] void fail_check(std::string_view advice, const char* file, int line);

/// Throws unless `ok`. The advice says what the user should do; the place is the caller's.
constexpr void check(bool ok, std::string_view advice, const char* file = __builtin_FILE(),
                     int line = __builtin_LINE()) {
  if (!ok) [[unlikely]]
    fail_check(advice, file, line);
}

}  // namespace detail

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/core/error.ipp"
#endif
