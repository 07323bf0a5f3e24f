// SPDX-License-Identifier: Apache-2.0
// Jobs of a thousand ranks and more, whose clients of the store are emulated.
#include "store/many_clients.hpp"

#include <sys/resource.h>

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "launch/watchdog.hpp"
#include "lockstep/detail/core/file.hpp"
#include "skipped.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(store_of_many_clients)

struct LongCase : Watchdog {
  LongCase() : Watchdog(std::chrono::seconds(240)) {}
};

/// The limits on open files, as they were, at the end of a case.
struct FileLimits : LongCase {
  FileLimits() { ::getrlimit(RLIMIT_NOFILE, &before); }
  ~FileLimits() { ::setrlimit(RLIMIT_NOFILE, &before); }
  rlimit before{};
};

BOOST_FIXTURE_TEST_CASE(a_thousand_and_four_thousand_ranks_meet, FileLimits) {
  for (const std::size_t ranks : {1000u, 4096u}) {
    if (ranks > 1000 && std::getenv("LOCKSTEP_LONG") == nullptr) {
      say_skipped("a job of " + std::to_string(ranks) + " emulated ranks (./x test --long)");
      continue;
    }
    if (detail::prefer_open_files(2 * ranks + 256) < 2 * ranks + 256) {
      say_skipped("a job of " + std::to_string(ranks) +
                  " emulated ranks (they need more open files: ulimit -Hn)");
      continue;
    }
    const many_clients::Times times = many_clients::play(ranks);
    std::printf(
        "%zu emulated ranks: connect %.2f s, join %.2f s, compare GPUs %.2f s, notice %.2f s\n",
        ranks, times.connect, times.join, times.gather, times.notice);
    // Messages grow with the ranks, not with their square.
    BOOST_TEST(times.requests == 7 * ranks + 1);
  }
}

BOOST_FIXTURE_TEST_CASE(the_limit_on_open_files_is_raised_to_what_is_needed, FileLimits) {
  const std::size_t now = detail::open_files();
  const rlimit low{now + 100, before.rlim_max};
  BOOST_TEST_REQUIRE(::setrlimit(RLIMIT_NOFILE, &low) == 0);
  BOOST_TEST(detail::allow_open_files(50, "a job of", 5) == 100u);
  BOOST_TEST(detail::allow_open_files(400, "a job of", 5) == 400u);
  rlimit after{};
  ::getrlimit(RLIMIT_NOFILE, &after);
  BOOST_TEST(after.rlim_cur == now + 400);
  const std::size_t too_many = before.rlim_max;
  if (before.rlim_max == RLIM_INFINITY) {
    say_skipped("more open files than allowed (here all are: ulimit -Hn)");
    return;
  }
  expect_error([&] { detail::allow_open_files(too_many, "the store of a job of", 500); },
               "the store of a job of 500 ranks needs " + std::to_string(now + too_many) +
                   " open files, and this process may have " + std::to_string(too_many),
               "LimitNOFILE=");
}

BOOST_AUTO_TEST_SUITE_END()
