// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What tests that could hang, or expect errors, share.

#include <unistd.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <csignal>
#include <string>

#include "lockstep/detail/core/error.hpp"

/// Ends the process after a time limit and says in which test case: a fixture, or a scope inside of
/// another's. By an alarm, because a test that forks must have no thread.
class Watchdog {
 public:
  explicit Watchdog(std::chrono::seconds limit = std::chrono::seconds(90)) {
    name() =
        "watchdog: hangs: " + boost::unit_test::framework::current_test_case().full_name() + "\n";
    struct sigaction action{};
    action.sa_handler = [](int) {
      [[maybe_unused]] const ssize_t n = ::write(2, name().data(), name().size());
      ::_exit(99);
    };
    ::sigaction(SIGALRM, &action, &before_);
    const auto seconds = static_cast<unsigned>(limit.count());
    outer_ = ::alarm(seconds);
    if (outer_ != 0 && outer_ < seconds) ::alarm(outer_);
  }
  ~Watchdog() {
    ::alarm(outer_ == 0 ? 0 : std::max(outer_, spent() + 1) - spent());
    ::sigaction(SIGALRM, &before_, nullptr);
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  static std::string& name() {
    static std::string name;
    return name;
  }
  unsigned spent() const {
    const auto time = std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - begin_);
    return static_cast<unsigned>(time.count());
  }

  Clock::time_point begin_ = Clock::now();
  unsigned outer_ = 0;  // seconds that an outer scope had left
  struct sigaction before_{};
};

/// What the lockstep::Error says that `make()` throws; empty when it throws none. For threads, in
/// which Boost.Test's own checks must not be used.
template <class Make>
std::string error_of(Make make) {
  try {
    make();
  } catch (const lockstep::Error& error) {
    return error.advice().empty() ? std::string() : error.what();
  }
  return {};
}

/// `make()` throws a lockstep::Error whose text contains every one of `parts`.
template <class Make, class... Parts>
void expect_error(Make make, const Parts&... parts) {
  const std::string text = error_of(make);
  for (const std::string& part : {std::string(parts)...}) {
    BOOST_TEST(text.find(part) != std::string::npos, "'" + text + "' lacks '" + part + "'");
  }
}
