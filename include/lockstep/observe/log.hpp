// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `--log FILE`: a JSON object per line, written by rank 0.

#include <string>

#include "lockstep/core/file.hpp"
#include "lockstep/core/json.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

/// Appends to an existing file, so that a resumed run continues its log. Each line reaches the file
/// whole and at once: a program that follows it (`tail -f`) never sees half a line, and a crash
/// loses none.
class LogFile {
 public:
  /// A log that drops all lines, for ranks other than the first.
  LogFile() = default;

  /// Opens `path` on rank 0.
  LogFile(const std::string& path, Rank rank);

  /// Are lines written? A rank that writes none need not make them.
  explicit operator bool() const { return static_cast<bool>(file_); }

  void write(const JsonLine& line);

 private:
  std::string path_;
  Descriptor file_;
};

}  // namespace lockstep::detail

LOCKSTEP_COLD_END
