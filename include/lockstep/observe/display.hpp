// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Shows the progress of a run: a bar on a terminal, a line now and then elsewhere.

#include <stdio_ext.h>

#include "lockstep/core/terminal.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/observe/summary.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep {

namespace detail {

/// `epoch 3/10  [######      ]   812/1875  loss 0.4123  54321 samples/s  0:12 left`
///
/// `batches` is the number of steps of the epoch; if it is 0, not known, there is neither a bar nor
/// a time. A narrow terminal lacks the bar first, then rate, loss and time. Output that is no
/// terminal lacks only the bar.
std::string progress_line(const EpochSummary& now, std::uint64_t batches, const Terminal& terminal);

/// The time that a display goes by: the steady clock's, or what a test says.
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

/// The progress display of a job.
/// On a terminal, one line drawn again about ten times a second and replaced by the summary at the
/// end of the epoch. Elsewhere the summary alone, and a line every ten seconds before it, so that
/// log files stay short. With `Terminal{}` it only counts and shows nothing, on all ranks but the
/// first.
///
/// What the program prints by itself while the bar is on the screen does not mix with it. Behind
/// lockstep's launcher the launcher sees to that. At a terminal, the code that erases the bar waits
/// in stdio's buffer, ahead of all text that printf or std::cout put there; and the bar is not
/// drawn into a line that the program has begun and not ended.
class ProgressDisplay {
 public:
  explicit ProgressDisplay(detail::Terminal terminal = {}) : terminal_(terminal) {}
  ProgressDisplay(const ProgressDisplay&) = delete;
  ProgressDisplay& operator=(const ProgressDisplay&) = delete;
  ~ProgressDisplay() { clear(); }

  /// `epoch` counts from 1; `epochs` and `batches` are 0 where they are not known.
  void begin_epoch(std::uint64_t epoch, std::uint64_t epochs, std::uint64_t batches);

  /// The epoch that has just begun goes on where `so_far` was taken.
  void go_on(const EpochSummary& so_far);

  /// To be called after every step, with its number of samples on all ranks. Returns whether the
  /// display has looked at its clock, which it does at every step after `look_at_every_step`.
  bool step(std::uint64_t samples) {
    ++now_.steps;
    now_.samples += samples;
    if (--until_look_ != 0) [[likely]]
      return false;
    look();
    return true;
  }
  /// To be called after every step, with the samples' mean loss too.
  bool step(std::uint64_t samples, double loss) {
    loss_sum_ += loss * static_cast<double>(samples);
    loss_samples_ += samples;
    return step(samples);
  }

  /// For a caller that has work of its own after each step: it needs no test of its own in runs
  /// that have none.
  void look_at_every_step() {
    looks_often_ = true;
    until_look_ = 1;
  }

  /// The steps of the epoch so far.
  std::uint64_t steps() const { return now_.steps; }

  /// The epoch so far.
  EpochSummary summary() const { return summary_at(detail::DisplayClock::now()); }

  /// Is there to be nothing but what the program prints?
  bool is_quiet() const { return terminal_.is_quiet; }

  /// Prints a line above the bar.
  void print(std::string_view line) {
    clear();
    write(detail::text({line, "\n"}));
  }

  /// Removes the bar from the screen until it is drawn again.
  void clear() {
    if (std::exchange(drawn_, false)) write(has_begun_line() ? "\n" : "\033[K\r");
  }

 private:
  using Clock = detail::DisplayClock;
  using Time = Clock::time_point;

  EpochSummary summary_at(Time time) const;

  /// Reading the clock takes longer than all the rest, so up to 16 short steps share one reading.
  /// More would delay the display when steps suddenly take long.
  void look();
  void show(Time time);
  /// Does stdio hold a line that the program has begun and not ended?
  bool has_begun_line() const {
    // A buffer that is not flushed at the end of a line holds whole lines too.
    return terminal_.is_terminal && terminal_.file != nullptr && ::__flbf(terminal_.file) != 0 &&
           ::__fpending(terminal_.file) > waiting_;
  }

  /// Writes text in one piece and at once: stdio keeps back text that does not end in a newline.
  void write(std::string_view text);

  detail::Terminal terminal_;
  EpochSummary now_;  // without time and loss, which summary_at adds
  std::uint64_t batches_ = 0;
  double loss_sum_ = 0;
  std::uint64_t loss_samples_ = 0;
  unsigned steps_per_look_ = 1;
  unsigned until_look_ = 1;
  bool looks_often_ = false;
  bool drawn_ = false;
  std::size_t waiting_ = 0;  // bytes of this display in stdio's buffer, behind the bar
  Time begin_ = Clock::now();
  Time looked_ = begin_;
  Time shown_ = begin_;
};

}  // namespace lockstep

LOCKSTEP_COLD_END
