// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks as forked processes that end with their parent, the memory they share with it, and a
/// folder that goes away.

#include <sys/mman.h>

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <functional>

namespace bench {

using Clock = std::chrono::steady_clock;

/// Zeroed memory that forked processes share.
class SharedMemory {
 public:
  explicit SharedMemory(std::size_t bytes);
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory() { ::munmap(data_, bytes_); }

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  std::size_t bytes_;
  void* data_;
};

class TemporaryFolder {
 public:
  explicit TemporaryFolder(
      const std::filesystem::path& where = std::filesystem::temp_directory_path());
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// Runs `body(rank)` in one process per rank and returns when all have ended well. Throws, with no
/// process left, if one fails, a signal asks this one to end, or the time is over.
void run_ranks(std::size_t ranks, Clock::time_point deadline,
               const std::function<void(std::size_t)>& body);

}  // namespace bench
