// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A rank as a child process: started so that it cannot outlive its launcher, its output
/// caught, its end noticed.

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <string>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/utility.hpp"
#include "lockstep/launch/output.hpp"

namespace lockstep::detail {

/// How a process ended, as wait() tells it.
struct ExitStatus {
  int code = 0;    // its exit status, if it exited
  int signal = 0;  // the signal that killed it, or 0

  /// The process was asked to stop, has saved its state and ended.
  bool is_stopped() const { return code == stopped_status && signal == 0; }
  bool is_failure() const { return (code != 0 || signal != 0) && !is_stopped(); }
  /// The status that a shell would report.
  int shell_status() const { return signal != 0 ? 128 + signal : code; }
  std::string text() const {
    if (signal == 0) return detail::text({"exit status ", code});
    const char* const name = ::strsignal(signal);
    return detail::text({"killed by signal ", signal, " (", name != nullptr ? name : "?", ")"});
  }
};

struct Child {
  Rank rank;
  pid_t pid = -1;
  Descriptor handle;  // a pidfd: readable once the process has ended
  Descriptor out;
  Descriptor err;
  Descriptor report;  // where it says why it fails
  LineCutter out_lines;
  LineCutter err_lines;
  std::string report_bytes;
  bool running = false;
  ExitStatus status;

  /// Its stdout (1), stderr (2) or report (3).
  Descriptor& pipe(int stream) { return stream == 1 ? out : stream == 2 ? err : report; }

  /// Signals the whole process group, and so also the processes that the rank has started.
  void send(int signal) const {
    if (running && ::kill(-pid, signal) != 0) ::kill(pid, signal);
  }

  /// Signals the rank alone: what it has started may not know the signal, and would die of it.
  void send_alone(int signal) const {
    if (running) ::kill(pid, signal);
  }

  /// Collects a process that has ended.
  void reap() {
    siginfo_t info{};
    while (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT) != 0 &&
           errno == EINTR) {
    }
    const bool exited = info.si_code == CLD_EXITED;
    status.code = exited ? info.si_status : 0;
    status.signal = exited ? 0 : info.si_status;
    // The group's number can be reused once the process is collected, so the group is killed now.
    if (status.is_failure()) ::kill(-pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    running = false;
    handle.close();
  }
};

/// Forks a child that runs `body`, which must not return. `report` is this end of the pipe through
/// which it tells a `Failure`.
///
/// The kernel kills the child when the thread that forked it ends, so that thread has to stay until
/// the child has ended. The child leads a process group of its own: Ctrl-C at a terminal reaches
/// the launcher alone, which then ends the ranks, and a rank can be ended together with the
/// processes it has started. A background group cannot read the terminal, so its stdin is empty.
inline Child start_child(Rank rank, Descriptor report, const sigset_t& signal_mask,
                         FunctionRef<void()> body) {
  Pipe out = make_pipe();
  Pipe err = make_pipe();
  const pid_t parent = ::getpid();
  Child child;
  child.rank = rank;
  child.pid = ::fork();
  if (child.pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(128 + SIGKILL);  // it died before the line above
    ::setpgid(0, 0);
    const int nothing = ::open("/dev/null", O_RDONLY);
    ::dup2(nothing, 0);
    ::close(nothing);
    ::dup2(out.write.get(), 1);
    ::dup2(err.write.get(), 2);
    ::pthread_sigmask(SIG_SETMASK, &signal_mask, nullptr);
    body();
    ::_exit(127);
  }
  if (child.pid < 0) {
    fail("launch", {"the process could not be started: ", error_text(errno)},
         "start fewer ranks, or raise the limits on processes and memory", rank);
  }
  child.running = true;
  ::setpgid(child.pid, child.pid);  // in both, because either may come first
  child.handle = Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, child.pid, 0)));
  if (!child.handle) {
    const std::string why = error_text(errno);
    child.send(SIGKILL);
    child.reap();
    fail("launch", {"the process cannot be watched (pidfd_open): ", why},
         "use Linux 5.3 or later, and raise the limit on open files (ulimit -n)", rank);
  }
  child.out = std::move(out.read);
  child.err = std::move(err.read);
  child.report = std::move(report);
  make_nonblocking(child.out.get());
  make_nonblocking(child.err.get());
  make_nonblocking(child.report.get());
  return child;
}

}  // namespace lockstep::detail
