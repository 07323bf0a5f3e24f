// SPDX-License-Identifier: Apache-2.0
// Tests that hang are ended and named, so that the others are run and somebody looks at the right
// one.
#include "launch/watchdog.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "comm/ranks.hpp"

BOOST_AUTO_TEST_SUITE(watchdog)

namespace {

using namespace std::chrono_literals;

/// What a process says that runs `f`; it must end with the watchdog's status.
std::string message_of(auto f) {
  int ends[2];
  BOOST_TEST_REQUIRE(::pipe(ends) == 0);
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(ends[1], 2);
    f();
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string words;
  char buffer[256];
  for (ssize_t n; (n = ::read(ends[0], buffer, sizeof buffer)) > 0;)
    words.append(buffer, static_cast<std::size_t>(n));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(pid, &status, 0);
  BOOST_TEST((WIFEXITED(status) && WEXITSTATUS(status) == 99), "status " << status);
  return words;
}

}  // namespace

BOOST_AUTO_TEST_CASE(ranks_that_hang_as_threads_are_ended_and_named) {
  const std::string words = message_of(
      [] { ranks::run_threads(2, 20s, [](auto&) { std::this_thread::sleep_for(60s); }, 1s); });
  BOOST_TEST(words == "watchdog: hangs: watchdog/ranks_that_hang_as_threads_are_ended_and_named\n");
}

BOOST_AUTO_TEST_CASE(a_scope_inside_another_ends_no_later) {
  const std::string words = message_of([] {
    const Watchdog outer(1s);
    const Watchdog inner(60s);
    std::this_thread::sleep_for(30s);
  });
  BOOST_TEST(!words.empty());
}

BOOST_AUTO_TEST_CASE(the_outer_scope_goes_on_after_the_inner) {
  const std::string words = message_of([] {
    const Watchdog outer(2s);
    {
      const Watchdog inner(60s);
    }
    std::this_thread::sleep_for(30s);
  });
  BOOST_TEST(!words.empty());
}

BOOST_AUTO_TEST_SUITE_END()
