// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What tests of files need: a folder of their own, files made of bytes, errors in words.

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "launch/watchdog.hpp"

namespace checkpoint {

namespace fs = std::filesystem;

/// A folder that is gone when the test is.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "lockstep-XXXXXX").string();
    BOOST_TEST_REQUIRE(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { fs::remove_all(path_); }

  std::string path() const { return path_.string(); }
  std::string operator/(std::string_view name) const { return (path_ / name).string(); }

 private:
  fs::path path_;
};

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
