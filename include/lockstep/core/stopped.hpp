// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How a job ends that was asked to stop: an exception that is no failure, and its exit
/// status.

#include <exception>
#include <string>
#include <string_view>

#include "lockstep/core/end_of_scope.hpp"
#include "lockstep/core/macros.hpp"

namespace lockstep {

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

/// `SIGTERM`, `SIGUSR1`, or `signal 12`.
std::string signal_name(int signal);

}  // namespace detail

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/core/stopped.ipp"
#endif
