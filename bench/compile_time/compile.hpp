// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What g++ takes for a program.

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

namespace bench {

struct Cost {
  double seconds = 0;  // of the processor: who else computes does not count
  double megabytes = 0;
};

/// Compiles a program that includes lockstep, or what else `flags` lead to, to an object: the
/// best of `runs`. Ends this process if it cannot be compiled.
Cost compile(const std::filesystem::path& source, const std::vector<std::string>& flags = {},
             std::size_t runs = 2);

}  // namespace bench
