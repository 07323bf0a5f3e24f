// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Repeating what must hold every time, at random points that can be repeated too.

#include <boost/test/unit_test.hpp>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <string>

#include "skipped.hpp"

namespace ranks {

/// `./x test --long` repeats more often, and `./x test` prints how many repetitions it skips.
inline int repetitions(int usually, int in_long_runs) {
  static std::set<std::string> said;
  if (std::getenv("LOCKSTEP_LONG") != nullptr) return in_long_runs;
  const std::string skipped = std::to_string(in_long_runs - usually) + " of " +
                              std::to_string(in_long_runs) + " repetitions of the case " +
                              boost::unit_test::framework::current_test_case().full_name();
  if (said.insert(skipped).second) say_skipped(skipped);
  return usually;
}

/// Random numbers of a test. The seed is printed; LOCKSTEP_SEED sets it, to see a failure again.
class Chance {
 public:
  Chance() : seed_(choose()), engine_(seed_) {
    const auto& test = boost::unit_test::framework::current_test_case().p_name.get();
    std::fprintf(stderr, "%s: LOCKSTEP_SEED=%u\n", test.c_str(), seed_);
  }

  /// One of [0, below).
  unsigned operator()(unsigned below) {
    return std::uniform_int_distribution<unsigned>(0, below - 1)(engine_);
  }

 private:
  static unsigned choose() {
    const char* const given = std::getenv("LOCKSTEP_SEED");
    return given != nullptr ? static_cast<unsigned>(std::stoul(given)) : std::random_device{}();
  }

  unsigned seed_;
  std::mt19937 engine_;
};

}  // namespace ranks
