// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks as processes that live and die together: the first failure ends the rest.

#include <poll.h>
#include <sys/signalfd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/launch/child.hpp"
#include "lockstep/launch/deadline.hpp"
#include "lockstep/launch/output.hpp"
#include "lockstep/launch/parse.hpp"
#include "lockstep/launch/terminal.hpp"

namespace lockstep {

/// How a job ended.
struct Outcome {
  /// Who failed first, and how. Empty when nobody did, or when a signal ended the job.
  std::optional<Rank> first;
  ExitStatus status;
  std::deque<std::string> last_words;
  /// SIGINT, SIGTERM or SIGHUP that this process was sent, or 0.
  int interrupted = 0;
  /// Who did not react to SIGTERM.
  std::vector<Rank> stubborn;

  int shell_status() const { return interrupted != 0 ? 128 + interrupted : status.shell_status(); }
};

/// How long ranks have between SIGTERM and SIGKILL. Two seconds remain of the ten after which the
/// job must be over. LOCKSTEP_GRACE_SECONDS is another.
inline std::chrono::milliseconds termination_grace() {
  const char* text = std::getenv("LOCKSTEP_GRACE_SECONDS");
  if (text == nullptr) return std::chrono::seconds(8);
  return parse_seconds("LOCKSTEP_GRACE_SECONDS", text);
}

/// What stands before everything a rank prints.
inline std::string line_prefix(Rank rank) { return "[rank " + std::to_string(rank.value()) + "] "; }

/// Starts ranks and looks after them in one poll() loop. While it exists, SIGINT, SIGTERM and
/// SIGHUP are blocked in this thread and read by the loop, unless they were ignored before (nohup).
/// In a program with other threads these must block them too, or the signal ends the process; its
/// ranks then end with it.
class Supervisor {
 public:
  explicit Supervisor(std::chrono::milliseconds grace = termination_grace()) : grace_(grace) {
    sigset_t blocked;
    sigset_t watched;
    ::sigemptyset(&blocked);
    ::sigemptyset(&watched);
    for (int signal : {SIGINT, SIGTERM, SIGHUP}) {
      struct sigaction action{};
      ::sigaction(signal, nullptr, &action);
      if (action.sa_handler == SIG_IGN) continue;
      ::sigaddset(&watched, signal);
      ::sigaddset(&blocked, signal);
    }
    ::sigaddset(&blocked, SIGPIPE);  // a write says it too, and only to the writer
    ::pthread_sigmask(SIG_BLOCK, &blocked, &mask_before_);
    signals_ = Descriptor(::signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!signals_) {
      const std::string why = error_text(errno);
      ::pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
      throw Error("launch", "signals cannot be watched (signalfd): " + why,
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

  /// Starts one rank: `body` runs in a forked process and must not return.
  template <class Body>
  void start(Rank rank, Body&& body) {
    children_.push_back(start_child(rank, mask_before_, std::forward<Body>(body)));
  }

  /// Passes output on until every rank has ended. Failure of one, or a signal, ends all: SIGTERM,
  /// and SIGKILL to those that are left after the grace; a second signal does not wait that long.
  Outcome run() {
    while (is_any_running() || (!queue_.is_empty() && !is_time_over())) {
      wait_for_events();
      if (kill_at_ && kill_at_->passed()) kill_rest();
    }
    for (Child& child : children_) drain(child);
    queue_.drop_status();
    write_queue();
    if (outcome_.first) {
      for (const Child& child : children_) {
        if (child.rank == *outcome_.first) outcome_.last_words = child.last_words.lines();
      }
    }
    return outcome_;
  }

 private:
  bool is_any_running() const {
    for (const Child& child : children_) {
      if (child.running) return true;
    }
    return false;
  }

  void wait_for_events() {
    std::vector<pollfd> polled;
    polled.push_back({signals_.get(), POLLIN, 0});
    polled.push_back({queue_.is_empty() ? -1 : queue_.next_stream(), POLLOUT, 0});
    // poll() passes over negative descriptors: closed pipes, and all while the queue is full.
    for (const Child& child : children_) {
      polled.push_back({child.running ? child.handle.get() : -1, POLLIN, 0});
      polled.push_back({queue_.is_full() ? -1 : child.out.get(), POLLIN, 0});
      polled.push_back({queue_.is_full() ? -1 : child.err.get(), POLLIN, 0});
    }
    if (::poll(polled.data(), polled.size(), next_deadline().poll_timeout()) <= 0) return;
    if (polled[0].revents != 0) read_signal();
    if (polled[1].revents != 0 && !queue_.is_empty()) queue_.write_some();
    std::vector<Child*> ended;
    for (std::size_t i = 0; i < children_.size(); ++i) {
      Child& child = children_[i];
      if (polled[3 * i + 3].revents != 0) read_some(child, 1);
      if (polled[3 * i + 4].revents != 0) read_some(child, 2);
      if (polled[3 * i + 2].revents != 0 && child.running) {
        child.reap();
        ended.push_back(&child);
      }
    }
    judge(ended);
  }

  /// Finds the first failure. Of several that were noticed at once, one that was killed counts as
  /// the first: a crash is seldom the consequence of another rank's error, the reverse is common.
  void judge(const std::vector<Child*>& ended) {
    const Child* first = nullptr;
    for (const Child* child : ended) {
      if (!child->status.is_failure()) continue;
      if (first == nullptr || (first->status.signal == 0 && child->status.signal != 0)) {
        first = child;
      }
    }
    if (first == nullptr || kill_at_) return;
    outcome_.first = first->rank;
    outcome_.status = first->status;
    terminate();
  }

  void read_signal() {
    signalfd_siginfo info{};
    if (::read(signals_.get(), &info, sizeof info) != sizeof info) return;
    if (outcome_.interrupted == 0 && !outcome_.first) {
      outcome_.interrupted = static_cast<int>(info.ssi_signo);
    }
    // After a failure, output that nobody reads yet is waited for, as by any program behind a
    // pager; after a signal not for long.
    if (!is_any_running()) {
      write_until_ = Deadline::after(std::chrono::milliseconds(0));
    } else if (kill_at_) {
      kill_rest();
      write_until_ = Deadline::after(std::chrono::milliseconds(500));
    } else {
      terminate();
      write_until_ = Deadline::after(grace_ + std::chrono::milliseconds(500));
    }
  }

  void terminate() {
    kill_at_ = Deadline::after(grace_);
    for (const Child& child : children_) {
      child.send(SIGTERM);
      child.send(SIGCONT);  // a stopped process takes no SIGTERM
    }
  }

  void kill_rest() {
    for (Child& child : children_) {
      if (child.running && !killed_) outcome_.stubborn.push_back(child.rank);
      child.send(SIGKILL);
    }
    killed_ = true;
    kill_at_ = Deadline::never();
  }

  /// Output that is still there need not be waited for any more.
  bool is_time_over() const { return write_until_ && write_until_->passed(); }

  Deadline next_deadline() const {
    const Deadline kill = kill_at_.value_or(Deadline::never());
    return write_until_ && !write_until_->passed() ? sooner(kill, *write_until_) : kill;
  }

  /// Reads one piece of a rank's stdout (1) or stderr (2). False when there is nothing now, or
  /// nothing any more.
  bool read_some(Child& child, int stream) {
    Descriptor& pipe = stream == 1 ? child.out : child.err;
    char buffer[65536];
    const ssize_t n = ::read(pipe.get(), buffer, sizeof buffer);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n <= 0) {
      pipe.close();
      return false;
    }
    LineCutter& lines = stream == 1 ? child.out_lines : child.err_lines;
    lines.feed(
        {buffer, static_cast<std::size_t>(n)},
        [&](std::string_view line) { pass_on(child, stream, line); },
        [&](std::string_view text) { queue_.push_status(line_prefix(child.rank), text); });
    return true;
  }

  /// What is left in the pipes of a rank that has ended. No more than a pipe holds, 1 MiB at most:
  /// something the rank has left behind may still be writing.
  void drain(Child& child) {
    for (int stream : {1, 2}) {
      const Descriptor& pipe = stream == 1 ? child.out : child.err;
      for (int i = 0; i < 16 && pipe && read_some(child, stream); ++i) write_queue();
    }
    child.out_lines.finish([&](std::string_view line) { pass_on(child, 1, line); });
    child.err_lines.finish([&](std::string_view line) { pass_on(child, 2, line); });
    child.out.close();
    child.err.close();
  }

  void pass_on(Child& child, int stream, std::string_view line) {
    if (stream == 2) child.last_words.add(line);
    queue_.push(stream, line_prefix(child.rank) + std::string(line) + "\n");
  }

  /// Empties the queue after all ranks have ended, unless a signal says otherwise.
  void write_queue() {
    kill_at_.reset();
    while (!queue_.is_empty()) {
      pollfd polled[] = {{signals_.get(), POLLIN, 0}, {queue_.next_stream(), POLLOUT, 0}};
      const int ready = is_time_over() ? 0 : ::poll(polled, 2, next_deadline().poll_timeout());
      if (ready > 0 && polled[1].revents != 0) queue_.write_some();
      if (ready > 0 && polled[0].revents != 0) read_signal();
      if (is_time_over()) queue_.clear();
    }
  }

  std::chrono::milliseconds grace_;
  sigset_t mask_before_{};
  Descriptor signals_;
  std::vector<Child> children_;
  OutputQueue queue_{detect_terminal(stdout).is_terminal};
  bool killed_ = false;
  std::optional<Deadline> kill_at_;      // set once the job is ending
  std::optional<Deadline> write_until_;  // set once a signal has come
  Outcome outcome_;
};

}  // namespace lockstep
