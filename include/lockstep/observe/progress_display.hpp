// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Shows how a run goes: a bar on a terminal, now and then a line elsewhere.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "lockstep/launch/terminal.hpp"
#include "lockstep/observe/epoch_summary.hpp"
#include "lockstep/observe/progress_line.hpp"

namespace lockstep {

/// On a terminal, one line drawn again about ten times a second and replaced by the summary at the
/// end of the epoch. Elsewhere the summary alone, and a line every ten seconds before it, so that
/// log files stay short. With `Terminal{}` it shows nothing and still counts: the display of all
/// ranks but the first.
///
/// While the bar is on the screen, what else goes there should go through `print`. Behind
/// lockstep's launcher that is not needed: the launcher keeps the bar and other lines apart.
template <class Clock>
class BasicProgressDisplay {
 public:
  explicit BasicProgressDisplay(Terminal terminal = {}) : terminal_(terminal) {}
  BasicProgressDisplay(const BasicProgressDisplay&) = delete;
  BasicProgressDisplay& operator=(const BasicProgressDisplay&) = delete;
  ~BasicProgressDisplay() { clear(); }

  /// `epoch` counts from 1; `epochs` and `batches` are 0 where they are not known.
  void begin_epoch(std::uint64_t epoch, std::uint64_t epochs, std::uint64_t batches) {
    now_ = {};
    now_.epoch = epoch;
    now_.epochs = epochs;
    batches_ = batches;
    loss_sum_ = 0;
    loss_samples_ = 0;
    steps_per_look_ = until_look_ = 1;
    begin_ = looked_ = shown_ = Clock::now();
    if (terminal_.is_terminal) show(begin_);
  }

  /// After every step, with its samples: all ranks' where the display is to show the job's rate.
  void step(std::uint64_t samples) {
    ++now_.steps;
    now_.samples += samples;
    if (--until_look_ == 0) [[unlikely]]
      look();
  }
  /// The same with the samples' mean loss.
  void step(std::uint64_t samples, double loss) {
    loss_sum_ += loss * static_cast<double>(samples);
    loss_samples_ += samples;
    step(samples);
  }

  /// The epoch so far.
  EpochSummary summary() const { return summary_at(Clock::now()); }

  /// Shows what the epoch has come to.
  EpochSummary end_epoch() {
    EpochSummary all = summary();
    end_epoch(all);
    return all;
  }
  /// The same with what is known only now: `summary()` with the loss of all ranks, or with scores.
  void end_epoch(const EpochSummary& all) { print(all.text()); }

  /// A line of the program's own, above the bar.
  void print(std::string_view line) {
    clear();
    write(std::string(line) + "\n");
  }

  /// Takes the bar off the screen until it is due again.
  void clear() {
    if (drawn_) write("\033[K\r");
    drawn_ = false;
  }

  double total_seconds() const { return seconds(Clock::now() - created_); }

 private:
  using Time = typename Clock::time_point;

  static double seconds(typename Clock::duration time) {
    return std::chrono::duration<double>(time).count();
  }

  EpochSummary summary_at(Time time) const {
    EpochSummary all = now_;
    all.seconds = seconds(time - begin_);
    if (loss_samples_ > 0) all.loss = loss_sum_ / static_cast<double>(loss_samples_);
    return all;
  }

  /// A look at the clock takes longer than all the rest, so short steps share one. Not more than
  /// 16: steps that suddenly take long must not be missed for minutes.
  void look() {
    const Time time = Clock::now();
    const bool brief = time - looked_ < std::chrono::milliseconds(10);
    steps_per_look_ = brief ? std::min(2 * steps_per_look_, 16u) : 1;
    until_look_ = steps_per_look_;
    looked_ = time;
    const std::chrono::milliseconds pause(terminal_.is_terminal ? 100 : 10'000);
    if (time - shown_ >= pause) show(time);
  }

  void show(Time time) {
    shown_ = time;
    const std::string line = progress_line(summary_at(time), batches_, terminal_);
    drawn_ = terminal_.is_terminal;
    write(line + (drawn_ ? "\033[K\r" : "\n"));
  }

  /// In one piece, and at once: stdio keeps back what does not end in a newline.
  void write(const std::string& text) const {
    if (terminal_.file == nullptr) return;
    std::fwrite(text.data(), 1, text.size(), terminal_.file);
    std::fflush(terminal_.file);
  }

  Terminal terminal_;
  EpochSummary now_;  // without time and loss, which summary_at adds
  std::uint64_t batches_ = 0;
  double loss_sum_ = 0;
  std::uint64_t loss_samples_ = 0;
  unsigned steps_per_look_ = 1;
  unsigned until_look_ = 1;
  bool drawn_ = false;
  Time created_ = Clock::now();
  Time begin_ = created_;
  Time looked_ = created_;
  Time shown_ = created_;
};

using ProgressDisplay = BasicProgressDisplay<std::chrono::steady_clock>;

}  // namespace lockstep
