// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The output and log of rank 0.

#include <string>
#include <string_view>

#include "lockstep/observe/epoch_summary.hpp"
#include "lockstep/observe/json_line.hpp"
#include "lockstep/observe/log_file.hpp"
#include "lockstep/observe/progress_display.hpp"

namespace lockstep::detail {

/// The object that `on_rank0` gives its function: it prints and logs, and cannot communicate.
class RunLog {
 public:
  RunLog(ProgressDisplay& display, LogFile& file) : display_(&display), file_(&file) {}

  /// Prints a line of text, kept apart from the progress bar.
  void print(std::string_view line) { display_->print(line); }

  /// Prints anything with a `summary()`, such as an epoch, as one line.
  template <class Summarised>
    requires requires(const Summarised& what) { what.summary().text(); }
  void print(const Summarised& what) {
    what.mark_as_printed();
    display_->print(what.summary().text());
  }

  /// Writes a line to the file of `--log`, if there is one.
  void write(const JsonLine& line) { file_->write(line); }

 private:
  ProgressDisplay* display_;
  LogFile* file_;
};

}  // namespace lockstep::detail
