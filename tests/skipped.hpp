// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How a test says that it leaves something out.

#include <cstdio>
#include <string>

/// Prints the line that `./x test` looks for, shows below the suite's row, and counts in its last
/// line. Messages of Boost.Test are not shown there.
inline void say_skipped(const std::string& what) {
  std::fprintf(stderr, "skipped: %s\n", what.c_str());
}
