// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `--log FILE`: a JSON object per line, written by rank 0.

#include <string>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/launch/descriptor.hpp"
#include "lockstep/observe/json_line.hpp"

namespace lockstep::detail {

/// Appends to what is there, so that a run that goes on from a checkpoint goes on with its log.
/// Each line reaches the file whole and at once: a program that follows it (`tail -f`) never sees
/// half a line, and a crash loses none.
class LogFile {
 public:
  /// Writes nowhere, as on every rank but the first.
  LogFile() = default;

  /// Opens `path` on rank 0.
  LogFile(const std::string& path, Rank rank);

  /// Whether lines go anywhere: a rank that does not write need not put them together.
  explicit operator bool() const { return static_cast<bool>(file_); }

  void write(const JsonLine& line);

 private:
  std::string path_;
  Descriptor file_;
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/observe/log_file.ipp"
#endif
