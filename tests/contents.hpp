// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The contents of a file, for tests.

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

inline std::string contents(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
