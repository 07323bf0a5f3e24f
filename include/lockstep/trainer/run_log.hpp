// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What rank 0 prints and logs.

#include <string>
#include <string_view>

#include "lockstep/observe/epoch_summary.hpp"
#include "lockstep/observe/json_line.hpp"
#include "lockstep/observe/log_file.hpp"
#include "lockstep/observe/progress_display.hpp"

namespace lockstep::detail {

/// What `on_rank0` hands out: ways to say something, and no way to communicate.
class RunLog {
 public:
  RunLog(ProgressDisplay& display, LogFile& file) : display_(&display), file_(&file) {}

  /// A line of text, kept apart from the progress bar.
  void print(std::string_view line) { display_->print(line); }

  /// Anything with a `summary()`, such as an epoch, as one line.
  template <class Summarised>
    requires requires(const Summarised& what) { what.summary().text(); }
  void print(const Summarised& what) {
    what.mark_as_printed();
    display_->print(what.summary().text());
  }

  /// A line of the file that `--log` names; nothing without one.
  void write(const JsonLine& line) { file_->write(line); }

 private:
  ProgressDisplay* display_;
  LogFile* file_;
};

}  // namespace lockstep::detail
