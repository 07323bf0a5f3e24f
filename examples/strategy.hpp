// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `--strategy dp` and `--backend shm`: which of several jobs a program is.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>

/// Takes an option with one of two values out of the arguments. Is it the second value? Not where
/// the option is not given.
///
/// Ranks that a launcher starts get the arguments that are left, and so the first value. That is
/// right as long as jobs of the second value are one process.
inline bool is_second(int& argc, char** argv, std::string_view name, std::string_view first,
                      std::string_view second) {
  char** const end = argv + argc;
  char** const option = std::find(argv, end, name);
  if (option == end) return false;
  const std::string_view value = option + 1 == end ? "" : option[1];
  if (value != first && value != second) {
    std::fprintf(stderr, "%s is %s or %s\n", name.data(), first.data(), second.data());
    std::exit(2);
  }
  std::copy(option + 2, end, option);
  argc -= 2;
  return value == second;
}

/// Replicas in one process, or ranks?
inline bool wants_dp(int& argc, char** argv) {
  return is_second(argc, argv, "--strategy", "ddp", "dp");
}

/// Ranks that are threads of one process, or processes that meet through NCCL?
inline bool wants_shm(int& argc, char** argv) {
  return is_second(argc, argv, "--backend", "nccl", "shm");
}
