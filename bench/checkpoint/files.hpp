// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Where contestants write; the plainest peers: so many bytes written and synced, read,
/// copied; and how much memory something took on the way.

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <span>
#include <string>
#include <system_error>

#include "processes.hpp"

namespace bench {

/// A folder with a file for every contestant.
class ContestantFiles : public TemporaryFolder {
 public:
  using TemporaryFolder::TemporaryFolder;
  std::string file(const std::string& name) const {
    return path() / (name + (name == "torch" ? ".pt" : ".safetensors"));
  }
};

class File {
 public:
  File(const std::string& path, int flags) : descriptor_(::open(path.c_str(), flags, 0644)) {
    if (descriptor_ < 0) throw std::system_error(errno, std::generic_category(), path);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { ::close(descriptor_); }
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

/// A plain write + fsync of as many bytes.
inline void write_plainly(const std::string& path, std::span<const std::byte> bytes) {
  const File file(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC);
  while (!bytes.empty()) {
    const ssize_t written = ::write(file.descriptor(), bytes.data(), bytes.size());
    if (written < 0) throw std::system_error(errno, std::generic_category(), "write");
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  if (::fsync(file.descriptor()) != 0)
    throw std::system_error(errno, std::generic_category(), "fsync");
}

/// A plain read into memory that is there.
inline void read_plainly(const std::string& path, std::span<std::byte> bytes) {
  const File file(path, O_RDONLY | O_CLOEXEC);
  while (!bytes.empty()) {
    const ssize_t got = ::read(file.descriptor(), bytes.data(), bytes.size());
    if (got <= 0) throw std::system_error(errno, std::generic_category(), "read");
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
}

/// The next reader of the file has to ask the disk.
inline void forget_cached(const std::string& path) {
  const File file(path, O_RDONLY | O_CLOEXEC);
  ::fsync(file.descriptor());
  ::posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_DONTNEED);
}

/// A field of /proc/self/status, in MiB.
inline double own_status(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != field + ":") continue;
    double kibibytes = 0;
    status >> kibibytes;
    return kibibytes / 1024;
  }
  return 0;
}

/// The memory that `f` takes beyond what there was before, at its height, in MiB.
template <class F>
double most_memory_of(const F& f) {
  std::ofstream("/proc/self/clear_refs") << "5";  // the height is what there is now
  const double before = own_status("VmRSS");
  f();
  return own_status("VmHWM") - before;
}

}  // namespace bench
