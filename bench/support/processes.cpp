// SPDX-License-Identifier: Apache-2.0
#include "processes.hpp"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

namespace bench {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

/// SIGCHLD and the wish to end are waited for, not handled, from here on: who asks twice must not
/// keep this process from cleaning up.
class Signals {
 public:
  Signals() {
    sigemptyset(&set_);
    for (const int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) sigaddset(&set_, signal);
    sigprocmask(SIG_BLOCK, &set_, &before_);
  }

  /// In a child, all is as before.
  void unblock() const { sigprocmask(SIG_SETMASK, &before_, nullptr); }

  /// The next signal, or -1 when the time is over.
  int wait(Clock::time_point deadline) const {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    const timespec limit{static_cast<time_t>(std::max<long>(left, 0) / 1000),
                         std::max<long>(left, 0) % 1000 * 1'000'000};
    return sigtimedwait(&set_, nullptr, &limit);
  }

 private:
  sigset_t set_;
  sigset_t before_;
};

/// Processes that are running; whoever is left at the end is killed.
class Children {
 public:
  Children() = default;
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;
  ~Children() {
    for (const pid_t child : running_) kill(child, SIGKILL);
    for (const pid_t child : running_) waitpid(child, nullptr, 0);
  }

  void add(pid_t child) { running_.push_back(child); }
  bool empty() const { return running_.empty(); }

  void collect() {
    std::string failure;
    std::erase_if(running_, [&](pid_t child) {
      int status = 0;
      if (waitpid(child, &status, WNOHANG) != child) return false;
      if (WIFSIGNALED(status))
        failure = "a rank died of signal " + std::to_string(WTERMSIG(status));
      if (WIFEXITED(status) && WEXITSTATUS(status) != 0) failure = "a rank failed";
      return true;
    });
    if (!failure.empty()) throw std::runtime_error(failure);
  }

 private:
  std::vector<pid_t> running_;
};

[[noreturn]] void be_rank(std::size_t rank, pid_t parent,
                          const std::function<void(std::size_t)>& body) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // it died before the line above
  try {
    body(rank);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %zu: %s\n", rank, error.what());
    _exit(1);
  }
  _exit(0);
}

}  // namespace

SharedMemory::SharedMemory(std::size_t bytes)
    : bytes_(bytes),
      data_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
  if (data_ == MAP_FAILED) fail("mmap");
}

TemporaryFolder::TemporaryFolder(const std::filesystem::path& where) {
  std::string name = where / "lockstep_bench_XXXXXX";
  if (mkdtemp(name.data()) == nullptr) fail(name);
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void run_ranks(std::size_t ranks, Clock::time_point deadline,
               const std::function<void(std::size_t)>& body) {
  std::fflush(nullptr);
  static const Signals signals;
  Children children;
  const pid_t parent = getpid();
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child < 0) fail("fork");
    if (child == 0) {
      signals.unblock();
      be_rank(rank, parent, body);
    }
    children.add(child);
  }
  while (true) {
    children.collect();
    if (children.empty()) return;
    const int signal = signals.wait(deadline);
    if (signal < 0 && errno == EAGAIN) throw std::runtime_error("the time limit is over");
    if (signal > 0 && signal != SIGCHLD) {
      throw std::runtime_error("ended by signal " + std::to_string(signal));
    }
  }
}

}  // namespace bench
