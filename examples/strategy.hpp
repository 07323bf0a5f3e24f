// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `--strategy dp` or `--strategy ddp`: which of two jobs a program is.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>

/// Takes the option out of the arguments. DDP where it is not given.
inline bool wants_dp(int& argc, char** argv) {
  char** const end = argv + argc;
  char** const option =
      std::find_if(argv, end, [](std::string_view word) { return word == "--strategy"; });
  if (option == end) return false;
  const std::string_view strategy = option + 1 == end ? "" : option[1];
  if (strategy != "dp" && strategy != "ddp") {
    std::fputs("--strategy is dp or ddp\n", stderr);
    std::exit(2);
  }
  std::copy(option + 2, end, option);
  argc -= 2;
  return strategy == "dp";
}
