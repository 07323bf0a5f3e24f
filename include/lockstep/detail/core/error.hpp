// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The exceptions: `Error`, and `Stopped`, the end of a job on request, which is no failure.

#include <stdexcept>

#include "lockstep/detail/core/scope_guard.hpp"
#include "lockstep/detail/core/text.hpp"

namespace lockstep {

/// Every error that a user sees: `lockstep: rank 2, all_reduce: the counts differ; call it ...`.
class Error : public std::runtime_error {
 public:
  [[gnu::cold]] Error(std::string_view operation, std::string_view problem, std::string_view advice,
                      std::optional<Rank> rank = std::nullopt);

  /// A copy with the rank, for code that knows it.
  Error on(Rank rank) const {
    Error error(operation_, problem_, advice_, rank);
    error.consequence_ = consequence_;
    return error;
  }

  /// A copy that is marked as the consequence of another rank's failure.
  Error as_consequence() const {
    Error error = *this;
    error.consequence_ = true;
    return error;
  }

  /// `what()` without a virtual call.
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

/// The exit status of a job stopped on request, EX_TEMPFAIL of sysexits.h; `--resume` continues it.
inline constexpr int stopped_status = 75;

/// Thrown on all ranks when the job was asked to stop (SIGTERM, SIGUSR1), after its checkpoint;
/// `launch` returns `stopped_status`. No `Error`: handlers do not catch it, and nothing aborts.
class Stopped : public std::exception {
 public:
  /// `signal` is 0 where none asked; `saved` is the checkpoint, empty where none was wanted.
  Stopped(int signal, std::string_view saved);

  const char* what() const noexcept override { return message_.c_str(); }
  int signal() const { return signal_; }
  const std::string& saved() const { return saved_; }

 private:
  int signal_;
  std::string saved_;
  std::string message_;
  detail::HarmlessMark mark_;
};

namespace detail {

/// The error that an exception is; one of another type has a problem only.
Error error_of(const std::exception_ptr& thrown);

/// As a line of its own on the error output.
void print_error(const Error& error);

/// The error, on the rank that has failed where it names none.
inline Error with_rank(const Error& error, std::optional<Rank> failed) {
  return error.rank() || !failed ? error : error.on(*failed);
}

/// Reports an exception that a destructor cannot throw: to a `LateFailures` if any, else to stderr.
void report_late_failure(const std::exception_ptr& thrown,
                         std::optional<Rank> rank = std::nullopt) noexcept;

/// Collects late failures while it exists; the destructor prints to stderr what was not taken.
class LateFailures {
 public:
  LateFailures();
  ~LateFailures();
  LateFailures(const LateFailures&) = delete;
  LateFailures& operator=(const LateFailures&) = delete;

  /// Removes and returns the oldest failure.
  std::optional<Error> take();
};

/// `SIGTERM`, `SIGUSR1`, or `signal 12`.
std::string signal_name(int signal);

/// Throws an `Error` whose problem is concatenated here, which keeps the code of error paths small.
[[noreturn, gnu::cold]] void fail(std::string_view operation,
                                  std::initializer_list<TextPart> problem, std::string_view advice,
                                  std::optional<Rank> rank = std::nullopt);

[[noreturn, gnu::cold]] void fail_check(std::string_view advice, const char* file, int line);

/// Throws unless `ok`; the error has the advice for the user, and the caller's file and line.
constexpr void check(bool ok, std::string_view advice, const char* file = __builtin_FILE(),
                     int line = __builtin_LINE()) {
  if (!ok) [[unlikely]]
    fail_check(advice, file, line);
}

}  // namespace detail

}  // namespace lockstep
