// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The output and log of rank 0.

#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/observe/epoch_summary.hpp"
#include "lockstep/observe/json_line.hpp"
#include "lockstep/observe/log_file.hpp"
#include "lockstep/observe/progress_display.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/strategy/agreement.hpp"

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

/// Policies by the names of their axes, without the library's namespaces.
void add_policy(JsonLine& policies, std::string_view axis, std::string_view spelling);
template <class... Ps>
JsonLine policy_fields(PolicyPack<Ps...>) {
  JsonLine policies;
  (add_policy(policies, Ps::axis::name, spelling<Ps>()), ...);
  return policies;
}

/// The first line that a run writes to its log: `{"run":{"time":...}}`.
JsonLine run_header(WorldSize world, Seed seed, std::uint64_t fingerprint,
                    const JsonLine& policies);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/trainer/run_log.ipp"
#endif
