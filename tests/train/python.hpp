// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The Python of a PyTorch, for tests that have it as a peer.

#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace train {

/// The python3 of a PyTorch, as `./x` finds it, or nothing.
inline std::string python_with_torch() {
  std::vector<std::string> folders;
  if (const char* const given = std::getenv("LOCKSTEP_TORCH")) folders.emplace_back(given);
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  const char* const home = std::getenv("HOME");
  if (cache != nullptr) folders.push_back(std::string(cache) + "/lockstep/torch/bin");
  if (home != nullptr) folders.push_back(std::string(home) + "/.cache/lockstep/torch/bin");
  for (const std::string& folder : folders) {
    const std::string python = folder + "/python3";
    if (::access(python.c_str(), X_OK) == 0) return python;
  }
  return {};
}

/// Runs a script of tests/train with these arguments, which may name files that begin with `path`.
/// A script that fails is an error of the test, in its own words.
inline bool ask_torch(const std::string& python, const std::string& script,
                      const std::string& arguments, const std::string& path) {
  const std::string command = "LD_PRELOAD= '" + python + "' " LOCKSTEP_SOURCE_DIR "/tests/train/" +
                              script + " " + arguments + " >/dev/null 2>" + path + ".errors";
  if (std::system(command.c_str()) == 0) return true;
  std::ifstream errors(path + ".errors");
  BOOST_ERROR("PyTorch failed: " << std::string(std::istreambuf_iterator<char>(errors), {}));
  return false;
}

}  // namespace train
