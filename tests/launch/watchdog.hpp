// SPDX-License-Identifier: Apache-2.0
#pragma once
// A fixture for test cases that could hang: after 30 s the process ends and says in which case.

#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <csignal>
#include <string>

#include "lockstep/core/error.hpp"

struct Watchdog {
  Watchdog() {
    name() =
        "watchdog: hangs: " + boost::unit_test::framework::current_test_case().full_name() + "\n";
    struct sigaction action{};
    action.sa_handler = [](int) {
      [[maybe_unused]] const ssize_t n = ::write(2, name().data(), name().size());
      ::_exit(99);
    };
    ::sigaction(SIGALRM, &action, &before_);
    ::alarm(30);
  }
  ~Watchdog() {
    ::alarm(0);
    ::sigaction(SIGALRM, &before_, nullptr);
  }

 private:
  static std::string& name() {
    static std::string name;
    return name;
  }
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
