// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `--log FILE`: a JSON object per line, written by rank 0.

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/launch/descriptor.hpp"
#include "lockstep/observe/json_line.hpp"

namespace lockstep {

/// Appends to what is there, so that a run that goes on from a checkpoint goes on with its log.
/// Each line reaches the file whole and at once: whoever follows it (`tail -f`) never sees half a
/// line, and a crash loses none.
class LogFile {
 public:
  /// Writes nowhere, as on every rank but the first.
  LogFile() = default;

  /// Opens `path` on rank 0.
  LogFile(std::string path, Rank rank) : path_(std::move(path)) {
    if (rank != Rank{0}) return;
    file_ = Descriptor(::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666));
    if (file_) return;
    const int error = errno;
    throw Error("log", "'" + path_ + "' cannot be opened: " + error_text(error),
                error == ENOENT ? "make its folder first, or name another file"
                                : "name a file that may be written",
                rank);
  }

  /// Whether lines go anywhere: whoever does not write need not put them together.
  explicit operator bool() const { return static_cast<bool>(file_); }

  void write(const JsonLine& line) {
    if (file_) write_whole(line.text() + "\n");
  }

 private:
  void write_whole(std::string_view line) {
    std::size_t done = 0;
    while (done < line.size()) {
      const ssize_t n = ::write(file_.get(), line.data() + done, line.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        const int error = errno;
        take_back(done);
        throw Error("log", "'" + path_ + "' cannot be written: " + error_text(error),
                    "make room there, or name a file elsewhere", Rank{0});
      }
      done += static_cast<std::size_t>(n);
    }
  }

  /// Removes the part of a line that still found room.
  void take_back(std::size_t bytes) {
    const off_t end = bytes == 0 ? -1 : ::lseek(file_.get(), 0, SEEK_END);
    if (end < 0) return;
    [[maybe_unused]] const int ignored = ::ftruncate(file_.get(), end - static_cast<off_t>(bytes));
  }

  std::string path_;
  Descriptor file_;
};

}  // namespace lockstep
