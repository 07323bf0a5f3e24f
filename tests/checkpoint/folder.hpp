// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What tests of files need: a folder of their own, files made of bytes, errors in words.

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "launch/watchdog.hpp"
#include "temporary_folder.hpp"

namespace checkpoint {

namespace fs = std::filesystem;

using Folder = TemporaryFolder;

inline std::string content(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline std::string put(const std::string& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::ssize(bytes));
  return path;
}

/// A safetensors file by hand: the length, the header, the data.
inline std::string file_of(std::string_view header, std::string_view data = {}) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(std::uint64_t{header.size()} >> (8 * i));
  return bytes.append(header).append(data);
}

using ::error_of;

inline bool holds(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace checkpoint
