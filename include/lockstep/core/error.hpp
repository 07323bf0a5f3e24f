// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The library's exceptions: an error, which says which rank, doing what, what went wrong and
/// what to do about it; and the end of a job that was asked to stop, which is no failure.

#include <exception>
#include <initializer_list>
#include <stdexcept>

#include "lockstep/core/scope_guard.hpp"
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

/// The exit status of a job that was stopped on request and whose state is saved: start it again
/// with `--resume`. It is EX_TEMPFAIL of sysexits.h: "try again later".
inline constexpr int stopped_status = 75;

/// Thrown on all ranks when the job was asked to stop (SIGTERM, SIGUSR1) and its state is saved.
/// `launch` turns it into `stopped_status`. It is no `Error` and no `std::runtime_error`, because
/// nothing went wrong: handlers of errors let it pass, and communicators that it drives out of
/// their scope do not tell other ranks of a failure.
class Stopped : public std::exception {
 public:
  /// `signal` is 0 where no signal asked. `saved` is the checkpoint; empty where none was wanted.
  Stopped(int signal, std::string_view saved);
  ~Stopped() override;

  const char* what() const noexcept override;

  int signal() const { return signal_; }
  const std::string& saved() const { return saved_; }

 private:
  int signal_;
  std::string saved_;
  std::string words_;
  detail::HarmlessMark mark_;
};

namespace detail {

/// Why a rank ended with an exception, as it tells its launcher. A rank does not print this itself:
/// the process that watches all ranks knows which failure was the first, and prints that one first
/// and once.
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

/// `SIGTERM`, `SIGUSR1`, or `signal 12`.
std::string signal_name(int signal);

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
