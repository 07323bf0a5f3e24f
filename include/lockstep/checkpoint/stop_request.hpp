// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file SIGTERM and SIGUSR1 ask a job to stop: a flag that the training loop looks at, and a time
/// limit.

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// While one exists, SIGTERM and SIGUSR1 do not end the process: the first of them is remembered.
/// All objects of a process, of ranks that are threads too, share what is remembered, and the
/// handlers. A signal that was ignored stays ignored; a handler that the program had is called as
/// well. A process that is forked meanwhile is not asked to stop: there a signal does what it did
/// before.
///
/// From the first signal on the process has LOCKSTEP_GRACE_SECONDS, 60 if that is not set, to call
/// `finished`. Otherwise it says so and ends with status 128 + the signal.
///
/// When the last object goes and nobody has asked, the handlers are put back. After a request, and
/// after `finished`, they stay: launchers often send a signal twice, and a rank that stops because
/// another was asked gets its own signal later. Neither must end a process that has saved its state
/// and is on its way out. `forget` is for programs that go on.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  /// The signal that has asked, or 0.
  int signal() const;
  bool is_made() const { return signal() != 0; }

  /// The step has ended and the state is saved: there is no time limit any more.
  void finished();

  /// Takes the request back and, where no object is left, puts the handlers back.
  static void forget();
};

}  // namespace lockstep::detail
