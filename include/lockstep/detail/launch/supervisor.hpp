// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The launcher's supervision of ranks as child processes: the first failure ends the rest.

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <cstdlib>
#include <ctime>

#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/launch/outcome.hpp"
#include "lockstep/detail/launch/output.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

/// From SIGTERM to SIGKILL: 8 s, or 60 s to save a checkpoint. LOCKSTEP_GRACE_SECONDS overrides it.
inline std::chrono::milliseconds termination_grace(bool saves) {
  const char* text = std::getenv("LOCKSTEP_GRACE_SECONDS");
  if (text == nullptr) return std::chrono::seconds(saves ? 60 : 8);
  return parse_seconds("LOCKSTEP_GRACE_SECONDS", text);
}

struct Child {
  RankEnd end;
  pid_t pid = -1;
  Descriptor handle;    // a pidfd, readable once the process has ended
  Descriptor pipes[3];  // stdout, stderr, and the report of a failure
  LineCutter lines[2];
  std::string report;
  bool running = false;

  /// Signals the process group: the rank and the processes that it has started.
  void send(int signal) const {
    if (running && ::kill(-pid, signal) != 0) ::kill(pid, signal);
  }

  void reap() {
    siginfo_t info{};
    while (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT) != 0 &&
           errno == EINTR) {
    }
    const bool exited = info.si_code == CLD_EXITED;
    end.code = exited ? info.si_status : 0;
    end.signal = exited ? 0 : info.si_status;
    // The group's id can be reused after waitpid, so the group is killed before.
    if (end.is_failure()) ::kill(-pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    running = false;
    handle.close();
  }
};

inline std::string line_prefix(Rank rank) { return text({"[rank ", rank, "] "}); }

/// Starts ranks and supervises them in one poll() loop. During its lifetime SIGINT, SIGTERM, SIGHUP
/// and, in a launcher, SIGUSR1 are blocked in this thread and read by the loop, unless they were
/// ignored (nohup). Other threads must block them too, or a signal ends the process and its ranks.
class Supervisor {
 public:
  /// `prints`: print why ranks failed, instead of leaving that to the caller.
  Supervisor(bool prints, bool saves)
      : prints_failures_(prints), saves_(saves), grace_(termination_grace(saves)) {
    sigset_t blocked;
    sigset_t watched;
    ::sigemptyset(&blocked);
    ::sigemptyset(&watched);
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
      struct sigaction action{};
      ::sigaction(signal, nullptr, &action);
      if (action.sa_handler == SIG_IGN || (signal == SIGUSR1 && !prints_failures_)) continue;
      ::sigaddset(&watched, signal);
      ::sigaddset(&blocked, signal);
    }
    ::sigaddset(&blocked, SIGPIPE);  // failed writes return EPIPE
    ::pthread_sigmask(SIG_BLOCK, &blocked, &mask_before_);
    signals_ = Descriptor(::signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!signals_) {
      const std::string why = error_text(errno);
      ::pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
      fail("launch", {"signals cannot be watched (signalfd): ", why},
           "raise the limit on open files (ulimit -n)");
    }
  }

  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  ~Supervisor() {
    for (Child& child : children_) {
      if (!child.running) continue;
      child.send(SIGKILL);
      child.reap();
    }
    sigset_t broken_pipe;
    ::sigemptyset(&broken_pipe);
    ::sigaddset(&broken_pipe, SIGPIPE);
    const timespec now{0, 0};
    if (!::sigismember(&mask_before_, SIGPIPE)) ::sigtimedwait(&broken_pipe, nullptr, &now);
    ::pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
  }

  /// Forks a rank that runs `body`, which must not return, and which writes its error to the
  /// other end of `report`. The kernel kills the child when the thread that forked it ends. The
  /// child leads a process group, so that Ctrl-C reaches only the launcher, which ends each rank
  /// with all that it has started; such a group cannot read the terminal, so its stdin is empty.
  void start(Rank rank, Descriptor report, FunctionRef<void()> body) {
    Pipe out = make_pipe();
    Pipe err = make_pipe();
    const pid_t parent = ::getpid();
    Child child;
    child.end.rank = rank;
    child.pid = ::fork();
    if (child.pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(128 + SIGKILL);  // the parent died before prctl
      ::setpgid(0, 0);
      const int nothing = ::open("/dev/null", O_RDONLY);
      ::dup2(nothing, 0);
      ::close(nothing);
      ::dup2(out.write.get(), 1);
      ::dup2(err.write.get(), 2);
      ::pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
      body();
      ::_exit(127);
    }
    if (child.pid < 0) {
      fail("launch", {"the process could not be started: ", error_text(errno)},
           "start fewer ranks, or raise the limits on processes and memory", rank);
    }
    child.running = true;
    ::setpgid(child.pid, child.pid);  // in parent and child, because either may be first
    child.handle = Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, child.pid, 0)));
    if (!child.handle) {
      const std::string why = error_text(errno);
      child.send(SIGKILL);
      child.reap();
      fail("launch", {"the process cannot be watched (pidfd_open): ", why},
           "use Linux 5.3 or later, and raise the limit on open files (ulimit -n)", rank);
    }
    child.pipes[0] = std::move(out.read);
    child.pipes[1] = std::move(err.read);
    child.pipes[2] = std::move(report);
    for (const Descriptor& pipe : child.pipes) make_nonblocking(pipe.get());
    children_.push_back(std::move(child));
  }

  /// Forwards output until every rank has ended. A failure or a signal ends all ranks: by SIGTERM,
  /// then by SIGKILL after the grace period or at a second signal. A rank that has saved its state
  /// and stopped is no failure, and the others continue. SIGUSR1 is only forwarded.
  Outcome run() {
    while (is_any_running() || (!queue_.is_empty() && !write_until_.passed())) {
      wait_for_events();
      if (blame_at_.passed()) blame_first();
      if (kill_at_.passed()) kill_rest();
    }
    blame_first();
    for (Child& child : children_) {
      drain(child);
      write_queue();
    }
    queue_.drop_status();
    write_queue();
    return std::move(outcome_);
  }

 private:
  bool is_any_running() const {
    return std::any_of(children_.begin(), children_.end(),
                       [](const Child& child) { return child.running; });
  }

  void wait_for_events() {
    std::vector<pollfd> polled(2 + 4 * children_.size(), pollfd{-1, POLLIN, 0});
    polled[0].fd = signals_.get();
    if (!queue_.is_empty()) polled[1] = {queue_.next_stream(), POLLOUT, 0};
    // poll() ignores negative descriptors: closed pipes, and all output while the queue is full.
    for (std::size_t i = 0; i < children_.size(); ++i) {
      const Child& child = children_[i];
      if (child.running) polled[4 * i + 2].fd = child.handle.get();
      for (std::size_t p = 0; p < 3; ++p) {
        if (p == 2 || !queue_.is_full()) polled[4 * i + 3 + p].fd = child.pipes[p].get();
      }
    }
    if (::poll(polled.data(), polled.size(), next_deadline().poll_timeout()) <= 0) return;
    if (polled[0].revents != 0) read_signal();
    if (polled[1].revents != 0 && !queue_.is_empty()) queue_.write_some();
    // Before output, so that a failure is printed before its consequences.
    std::vector<RankEnd> failed;
    for (std::size_t i = 0; i < children_.size(); ++i) {
      Child& child = children_[i];
      if (polled[4 * i + 2].revents == 0) continue;
      child.reap();
      if (child.end.is_stopped()) outcome_.stopped.push_back(child.end.rank);
      if (!child.end.is_failure()) continue;
      drain(child);
      child.end.failure = error_from_bytes(child.report);
      failed.push_back(child.end);
    }
    judge(failed);
    for (std::size_t i = 0; i < children_.size(); ++i) {
      for (std::size_t p = 0; p < 3; ++p) {
        if (polled[4 * i + 3 + p].revents != 0) read_some(children_[i], p);
      }
    }
  }

  /// Ends the rest after the first failure. A consequence seen first gives its cause time to end.
  void judge(const std::vector<RankEnd>& failed) {
    for (int precedence : {0, 1, 2}) {
      for (const RankEnd& end : failed) {
        if (end.precedence() != precedence) continue;
        if (end.is_consequence()) {
          outcome_.consequences.push_back(end);
          blame_at_ = sooner(blame_at_, Deadline::after(std::min(grace_, cause_wait)));
        } else if (is_ending_) {
          if (!outcome_.late || outcome_.late->is_ended()) outcome_.late = end;
          print_failure(end);
        } else if (end.signal == SIGUSR1 && is_usr1_sent_) {
          interrupt(SIGUSR1);
        } else {
          begin_end(end);
        }
      }
    }
  }

  /// The cause is unknown, so the end that was seen first counts as the first failure.
  void blame_first() {
    blame_at_ = Deadline::never();
    if (is_ending_ || outcome_.consequences.empty()) return;
    const RankEnd first = outcome_.consequences.front();
    outcome_.consequences.erase(outcome_.consequences.begin());
    begin_end(first);
  }

  void begin_end(const RankEnd& first) {
    outcome_.first = first;
    print_failure(first);
    if (prints_failures_) {
      queue_.push(2, text({"lockstep: ", first.message(),
                           is_any_running() ? "; ending the others\n" : "\n"}));
    }
    terminate();
  }

  void interrupt(int signal) {
    outcome_.interrupted = signal;
    terminate();
  }

  void print_failure(const RankEnd& end) {
    if (!prints_failures_ || !end.failure) return;
    LineCutter lines;
    const auto print = [&](std::string_view line, bool) { pass_on(end.rank, 1, line, false); };
    lines.feed(with_rank(*end.failure, end.rank).what(), print);
    lines.finish(print);
  }

  void read_signal() {
    signalfd_siginfo info{};
    if (::read(signals_.get(), &info, sizeof info) != sizeof info) return;
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGUSR1) {
      is_usr1_sent_ = true;
      // Only the rank: processes that it has started may not handle the signal.
      for (const Child& child : children_) {
        if (child.running) ::kill(child.pid, SIGUSR1);
      }
      return;
    }
    outcome_.is_unwanted = true;
    // After a failure, output is written however long it takes; after a signal, only briefly.
    if (!is_any_running()) {
      const bool is_cause = !outcome_.first && outcome_.interrupted == 0;
      if (is_cause) outcome_.interrupted = signal;
      write_until_ = Deadline::after(std::chrono::milliseconds(0));
    } else if (again_at_.is_ever() && !again_at_.passed()) {
      return;
    } else if (is_ending_) {
      kill_rest();
      write_until_ = Deadline::after(std::chrono::milliseconds(500));
    } else {
      if (saves_) {
        queue_.push(2, text({"lockstep: asked to stop by signal ", signal, "; ranks have ",
                             seconds_text(grace_),
                             " to save their state, and are ended at once by another signal\n"}));
      }
      interrupt(signal);
      again_at_ = Deadline::after(same_signal);
      write_until_ = Deadline::after(grace_ + std::chrono::milliseconds(1000));
    }
  }

  void terminate() {
    // Ranks that save enforce the same limit themselves and report it, so they get 500 ms more.
    is_ending_ = true;
    kill_at_ = Deadline::after(grace_ + std::chrono::milliseconds(saves_ ? 500 : 0));
    for (const Child& child : children_) {
      child.send(SIGTERM);
      child.send(SIGCONT);  // a stopped process does not handle SIGTERM
    }
  }

  void kill_rest() {
    for (Child& child : children_) {
      if (child.running && !killed_) outcome_.stubborn.push_back(child.end.rank);
      child.send(SIGKILL);
    }
    killed_ = true;
    kill_at_ = Deadline::never();
  }

  Deadline next_deadline() const {
    const Deadline kill = sooner(kill_at_, blame_at_);
    return write_until_.passed() ? kill : sooner(kill, write_until_);
  }

  /// False at the end, or when there is nothing now.
  bool read_some(Child& child, std::size_t which) {
    char buffer[65536];
    const ssize_t n = ::read(child.pipes[which].get(), buffer, sizeof buffer);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n <= 0) {
      child.pipes[which].close();
      return false;
    }
    const std::string_view bytes(buffer, static_cast<std::size_t>(n));
    if (which == 2) {
      child.report += bytes;
      return true;
    }
    child.lines[which].feed(bytes, [&](std::string_view line, bool is_status) {
      pass_on(child.end.rank, which, line, is_status);
    });
    return true;
  }

  /// Reads an ended rank's pipes, at most 1 MiB each: processes it left behind may still write.
  void drain(Child& child) {
    for (std::size_t p = 0; p < 3; ++p) {
      for (int i = 0; i < 16 && child.pipes[p] && read_some(child, p);) ++i;
      child.pipes[p].close();
    }
    for (std::size_t p = 0; p < 2; ++p) {
      child.lines[p].finish(
          [&](std::string_view line, bool) { pass_on(child.end.rank, p, line, false); });
    }
  }

  /// `which` is 0 for stdout, 1 for stderr.
  void pass_on(Rank rank, std::size_t which, std::string_view line, bool is_status) {
    if (is_status) return queue_.push_status(line_prefix(rank), line);
    queue_.push(which == 0 ? 1 : 2, text({line_prefix(rank), line, "\n"}));
  }

  void write_queue() {
    kill_at_ = Deadline::never();
    while (!queue_.is_empty()) {
      pollfd polled[] = {{signals_.get(), POLLIN, 0}, {queue_.next_stream(), POLLOUT, 0}};
      const int ready =
          write_until_.passed() ? 0 : ::poll(polled, 2, next_deadline().poll_timeout());
      if (ready > 0 && polled[1].revents != 0) queue_.write_some();
      if (ready > 0 && polled[0].revents != 0) read_signal();
      if (write_until_.passed()) queue_.clear();
    }
  }

  static constexpr std::chrono::milliseconds cause_wait{1000};
  /// A signal this soon after the first is the same: timeout(1) signals the process and its group.
  static constexpr std::chrono::milliseconds same_signal{500};

  bool prints_failures_;
  bool saves_;
  bool is_usr1_sent_ = false;
  std::chrono::milliseconds grace_;
  sigset_t mask_before_{};
  Descriptor signals_;
  std::vector<Child> children_;
  OutputQueue queue_{detect_terminal(stdout).is_terminal};
  bool killed_ = false;
  bool is_ending_ = false;
  Deadline kill_at_ = Deadline::never();      // set when the job is ending
  Deadline blame_at_ = Deadline::never();     // set when a rank has failed because of another
  Deadline again_at_ = Deadline::never();     // when a second signal counts
  Deadline write_until_ = Deadline::never();  // set by a signal
  Outcome outcome_;
};

}  // namespace lockstep::detail

LOCKSTEP_COLD_END
