// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Shows the progress of a run: a bar on a terminal, a line now and then elsewhere.

#include <stdio_ext.h>

#include "lockstep/detail/core/terminal.hpp"
#include "lockstep/detail/observe/summary.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep {

namespace detail {

/// `epoch 3/10  [######      ]   812/1875  loss 0.4123  54321 samples/s  0:12 left`
///
/// `batches` is the number of steps of the epoch; 0, if not known, shows neither bar nor time. A
/// narrow terminal lacks the bar first, then rate, loss and time; other output lacks only the bar.
std::string progress_line(const EpochSummary& now, std::uint64_t batches, const Terminal& terminal);

/// The steady clock, or a test's.
struct DisplayClock {
  using time_point = std::chrono::steady_clock::time_point;
  static inline const time_point* fake = nullptr;
  static inline int fake_looks = 0;

  static time_point now() {
    if (fake == nullptr) [[likely]]
      return std::chrono::steady_clock::now();
    ++fake_looks;
    return *fake;
  }
};

}  // namespace detail

/// On a terminal, a bar that is redrawn about ten times a second and replaced by the epoch's
/// summary. Elsewhere the summary and, to keep log files short, a line every ten seconds before it.
/// With `Terminal{}`, on all ranks but the first, it only counts. The program's output does not mix
/// with the bar: the launcher separates them or, at a terminal, the code that erases the bar waits
/// in stdio's buffer, ahead of text from printf or std::cout. Unfinished lines get no bar.
class ProgressDisplay {
 public:
  explicit ProgressDisplay(detail::Terminal terminal = {}) : terminal_(terminal) {}
  ProgressDisplay(const ProgressDisplay&) = delete;
  ProgressDisplay& operator=(const ProgressDisplay&) = delete;
  ~ProgressDisplay() { clear(); }

  /// `epoch` counts from 1; `epochs` and `batches` are 0 if not known.
  void begin_epoch(std::uint64_t epoch, std::uint64_t epochs, std::uint64_t batches);

  /// Continues the epoch that has just begun from `so_far`.
  void go_on(const EpochSummary& so_far);

  /// Comes after every step, with its samples on all ranks. Returns whether the clock was read.
  bool step(std::uint64_t samples) {
    ++now_.steps;
    now_.samples += samples;
    if (--until_look_ != 0) [[likely]]
      return false;
    look();
    return true;
  }
  /// With the samples' mean loss too.
  bool step(std::uint64_t samples, double loss) {
    loss_sum_ += loss * static_cast<double>(samples);
    loss_samples_ += samples;
    return step(samples);
  }

  /// What a batch of this rank holds and takes, where the batch or the model says it.
  void count_work(std::uint64_t samples, double flops, double tokens) {
    work_samples_ += samples;
    flops_ += flops;
    tokens_ += tokens;
  }
  /// Of all ranks, in a second.
  void set_peak_flops(double peak) { peak_flops_ = peak; }

  /// For callers with work after each step; other runs then need no test for it.
  void look_at_every_step() {
    looks_often_ = true;
    until_look_ = 1;
  }

  std::uint64_t steps() const { return now_.steps; }

  EpochSummary summary() const { return summary_at(detail::DisplayClock::now()); }

  /// Is only the program's own output shown?
  bool is_quiet() const { return terminal_.is_quiet; }

  /// Prints a line above the bar.
  void print(std::string_view line) {
    clear();
    write(detail::text({line, "\n"}));
  }

  /// Removes the bar until it is drawn again.
  void clear() {
    if (std::exchange(drawn_, false)) write(has_begun_line() ? "\n" : "\033[K\r");
  }

 private:
  using Time = std::chrono::steady_clock::time_point;

  EpochSummary summary_at(Time time) const;

  /// Reading the clock is costly, so up to 16 short steps share it; more would delay the display.
  void look();
  void show(Time time);
  /// Does stdio hold a line that the program has not ended?
  bool has_begun_line() const {
    // A stream that is not line-buffered holds whole lines too.
    return terminal_.is_terminal && terminal_.file != nullptr && ::__flbf(terminal_.file) != 0 &&
           ::__fpending(terminal_.file) > waiting_;
  }

  /// Writes and flushes text in one piece: stdio keeps back text without a newline.
  void write(std::string_view text);

  detail::Terminal terminal_;
  EpochSummary now_;  // without time and loss, which summary_at adds
  std::uint64_t batches_ = 0;
  double loss_sum_ = 0;
  std::uint64_t loss_samples_ = 0;
  std::uint64_t work_samples_ = 0;
  double flops_ = 0;
  double tokens_ = 0;
  double peak_flops_ = 0;
  unsigned steps_per_look_ = 1;
  unsigned until_look_ = 1;
  bool looks_often_ = false;
  bool drawn_ = false;
  std::size_t waiting_ = 0;  // bytes of this display in stdio's buffer, behind the bar
  Time begin_ = detail::DisplayClock::now();
  Time looked_ = begin_;
  Time shown_ = begin_;
};

}  // namespace lockstep

LOCKSTEP_COLD_END
