// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `stopped.hpp`.

#include <csignal>

#include "lockstep/core/stopped.hpp"
#include "lockstep/core/text.hpp"

namespace lockstep {

namespace detail {

LOCKSTEP_INLINE std::string signal_name(int signal) {
  switch (signal) {
    case SIGTERM:
      return "SIGTERM";
    case SIGUSR1:
      return "SIGUSR1";
    default:
      return text({"signal ", signal});
  }
}

}  // namespace detail

LOCKSTEP_INLINE Stopped::Stopped(int signal, std::string_view saved)
    : signal_(signal),
      saved_(saved),
      words_(detail::text(
          {"lockstep: stopped on request",
           signal == 0 ? std::string() : detail::text({" (", detail::signal_name(signal), ")"}),
           saved.empty() ? "; no checkpoint was wanted, so nothing is saved"
                         : "; the state is saved: ",
           saved, saved.empty() ? "" : "; start the job again with --resume to go on"})) {}

LOCKSTEP_INLINE Stopped::~Stopped() = default;

LOCKSTEP_INLINE const char* Stopped::what() const noexcept { return words_.c_str(); }

}  // namespace lockstep
