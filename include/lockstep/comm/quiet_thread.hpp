// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Threads to which no signal is delivered.

#include <signal.h>

#include <utility>

namespace lockstep {

/// `start()`, so that the threads it starts get no signals. These are the program's business: its
/// handlers must not run on a thread that it does not know of.
template <class Start>
auto without_signals(Start&& start) {
  struct Blocked {
    Blocked() {
      sigset_t all;
      ::sigfillset(&all);
      ::pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Blocked() { ::pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  };
  const Blocked blocked;
  return std::forward<Start>(start)();
}

}  // namespace lockstep
