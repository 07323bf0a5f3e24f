// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The metrics of an epoch, as text or JSON; its wall time by phase; and the file of `--log`.

#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/core/json.hpp"
#include "lockstep/detail/observe/scores.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep {

/// The metrics of one epoch, as they are printed and logged.
struct EpochSummary {
  std::uint64_t epoch = 1;   // from 1, as it is shown
  std::uint64_t epochs = 0;  // 0: not known
  std::uint64_t steps = 0;
  std::uint64_t samples = 0;
  double seconds = 0;
  std::optional<double> loss = {};  // the mean over samples with a known loss
  Scores scores = {};               // of an evaluation, where there was one
  double flops = 0;                 // of a sample, by `model.flops(batch)`; 0: it does not say
  double tokens = 0;                // of a sample
  double peak_flops = 0;            // of all ranks in a second, by `--peak-flops`; 0: not known

  double samples_per_second() const {
    return seconds > 0 ? static_cast<double>(samples) / seconds : 0;
  }
  double tokens_per_second() const { return tokens * samples_per_second(); }
  double flops_per_second() const { return flops * samples_per_second(); }
  /// Model FLOP utilisation: the share of the peak that the model's own arithmetic takes.
  double utilisation() const { return peak_flops > 0 ? flops_per_second() / peak_flops : 0; }

  /// `epoch 3/10`
  std::string title() const {
    return detail::text({"epoch ", epoch, epochs == 0 ? "" : detail::text({"/", epochs})});
  }

  /// `epoch 3/10  1875 steps  loss 0.4123  accuracy 0.9712  54321 samples/s  1.1 s`
  std::string text() const;

  JsonLine json() const;
};

}  // namespace lockstep

namespace lockstep::detail {

/// The memory that this process has now, in bytes.
double resident_bytes();

/// Times epochs and evaluations, never a step: the rest of the loop over the data counts as steps.
class PhaseTimes {
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

 public:
  void begin_epoch() { *this = PhaseTimes(); }

  /// Adds an evaluation since `begin`. `in_loop`: it is part of the loop's time.
  void add_evaluation(Clock::time_point begin, bool in_loop) {
    const Seconds took = Clock::now() - begin;
    evaluations_ += took;
    if (in_loop) in_loop_ += took;
  }

  void set_waits(Seconds waits) { waits_ = waits; }

  /// The times as fields of a record; `loop`: seconds of the loop over the data.
  JsonLine json(double loop) const {
    const double steps = std::max(0.0, loop - (waits_ + in_loop_).count());
    JsonLine line;
    line.add("data_seconds", waits_.count()).add("step_seconds", steps);
    line.add("evaluate_seconds", evaluations_.count());
    return line.add("epoch_seconds", Seconds(Clock::now() - begin_).count());
  }

 private:
  Clock::time_point begin_ = Clock::now();
  Seconds waits_{};
  Seconds evaluations_{};
  Seconds in_loop_{};  // evaluations in the loop over the data
};

/// The log of a run, a JSON object per line, appended whole and at once: crashes lose no line.
class LogFile {
 public:
  /// A log that drops all lines, for ranks other than the first.
  LogFile() = default;

  /// Opens `path` on rank 0.
  LogFile(const std::string& path, Rank rank);

  explicit operator bool() const { return static_cast<bool>(file_); }

  void write(const JsonLine& line);

 private:
  std::string path_;
  Descriptor file_;
};

}  // namespace lockstep::detail

LOCKSTEP_COLD_END
