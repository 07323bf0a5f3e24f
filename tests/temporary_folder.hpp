// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A folder of a test's own.

#include <stdlib.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

/// A folder that is removed, with everything in it, when this object is.
struct TemporaryFolder {
  TemporaryFolder()
      : path((std::filesystem::temp_directory_path() / "lockstep-test-XXXXXX").string()) {
    if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("no folder " + path);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code none;  // a destructor must not throw
    std::filesystem::remove_all(path, none);
  }

  std::string operator/(std::string_view name) const {
    return (std::filesystem::path(path) / name).string();
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path))
      names.push_back(entry.path().filename().string());
    return names;
  }

  std::string path;
};
