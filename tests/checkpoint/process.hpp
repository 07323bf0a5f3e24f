// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A process of its own for what ends or locks processes.

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>
#include <string>

namespace checkpoint_tests {

/// A process that runs `f()`, whose result is its exit status. What it says on stderr can be read.
class Process {
 public:
  template <class F>
  explicit Process(F f) {
    int ends[2];
    BOOST_TEST_REQUIRE(::pipe(ends) == 0);
    std::fflush(nullptr);
    pid = ::fork();
    BOOST_TEST_REQUIRE(pid >= 0);
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // the watchdog ends the test, and so this
      ::dup2(ends[1], 2);
      ::close(ends[0]);
      ::close(ends[1]);
      int status = 99;
      try {
        status = f();
      } catch (const std::exception& error) {
        std::fputs(error.what(), stderr);
      }
      std::fflush(nullptr);
      ::_exit(status);
    }
    ::close(ends[1]);
    said_ = ends[0];
  }
  ~Process() {
    if (!is_over_) ::kill(pid, SIGKILL);
    end();
    ::close(said_);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  /// Reads until the process has said so many bytes, or has ended.
  const std::string& words(std::size_t bytes = std::string::npos) {
    char buffer[256];
    while (words_.size() < bytes) {
      const ssize_t n = ::read(said_, buffer, sizeof buffer);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) break;
      words_.append(buffer, static_cast<std::size_t>(n));
    }
    return words_;
  }

  /// The exit status, or minus the signal that ended the process.
  int end() {
    if (!is_over_) {
      while (::waitpid(pid, &status_, 0) < 0 && errno == EINTR) {
      }
      is_over_ = true;
    }
    return WIFEXITED(status_) ? WEXITSTATUS(status_) : -WTERMSIG(status_);
  }

  pid_t pid;

 private:
  int said_ = -1;
  int status_ = 0;
  bool is_over_ = false;
  std::string words_;
};

/// Says a word to whoever watches this process.
inline void say(const char* word) {
  std::fputs(word, stderr);
  std::fflush(stderr);
}

}  // namespace checkpoint_tests
