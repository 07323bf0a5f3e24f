// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `progress_display.hpp`.

#include <stdio_ext.h>

#include <algorithm>
#include <cstdio>

#include "lockstep/core/text.hpp"
#include "lockstep/observe/progress_display.hpp"
#include "lockstep/observe/progress_line.hpp"

namespace lockstep::detail {

template <class Clock>
void BasicProgressDisplay<Clock>::begin_epoch(std::uint64_t epoch, std::uint64_t epochs,
                                              std::uint64_t batches) {
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

template <class Clock>
void BasicProgressDisplay<Clock>::go_on(const EpochSummary& so_far) {
  now_.steps = so_far.steps;
  now_.samples = so_far.samples;
  begin_ -= std::chrono::duration_cast<typename Clock::duration>(
      std::chrono::duration<double>(so_far.seconds));
  if (!so_far.loss) return;
  loss_samples_ = so_far.samples;
  loss_sum_ = *so_far.loss * static_cast<double>(so_far.samples);
}

template <class Clock>
EpochSummary BasicProgressDisplay<Clock>::end_epoch() {
  EpochSummary all = summary();
  end_epoch(all);
  return all;
}

template <class Clock>
void BasicProgressDisplay<Clock>::print(std::string_view line) {
  clear();
  write(detail::text({line, "\n"}));
}

template <class Clock>
void BasicProgressDisplay<Clock>::clear() {
  if (drawn_) write(has_begun_line() ? "\n" : "\033[K\r");
  drawn_ = false;
}

template <class Clock>
EpochSummary BasicProgressDisplay<Clock>::summary_at(Time time) const {
  EpochSummary all = now_;
  all.seconds = seconds(time - begin_);
  if (loss_samples_ > 0) all.loss = loss_sum_ / static_cast<double>(loss_samples_);
  return all;
}

template <class Clock>
void BasicProgressDisplay<Clock>::look() {
  const Time time = Clock::now();
  const bool brief = time - looked_ < std::chrono::milliseconds(10);
  steps_per_look_ = brief && !looks_often_ ? std::min(2 * steps_per_look_, 16u) : 1;
  until_look_ = steps_per_look_;
  looked_ = time;
  const std::chrono::milliseconds pause(terminal_.is_terminal ? 100 : 10'000);
  if (time - shown_ >= pause) show(time);
}

template <class Clock>
void BasicProgressDisplay<Clock>::show(Time time) {
  shown_ = time;
  if (terminal_.is_quiet || has_begun_line()) return;
  if (terminal_.is_own) {  // windows change their width
    terminal_.columns = terminal_columns(::fileno(terminal_.file)).value_or(terminal_.columns);
  }
  const std::string line = progress_line(summary_at(time), batches_, terminal_);
  drawn_ = terminal_.is_terminal;
  write(detail::text({line, drawn_ ? "\033[K\r" : "\n"}));
  if (!drawn_ || !terminal_.is_own || ::__flbf(terminal_.file) == 0) return;
  waiting_ = std::fwrite("\033[K", 1, 3, terminal_.file);
}

template <class Clock>
bool BasicProgressDisplay<Clock>::has_begun_line() const {
  // A buffer that is not flushed at the end of a line holds whole lines too.
  return terminal_.is_terminal && terminal_.file != nullptr && ::__flbf(terminal_.file) != 0 &&
         ::__fpending(terminal_.file) > waiting_;
}

template <class Clock>
void BasicProgressDisplay<Clock>::write(std::string_view text) {
  if (terminal_.file == nullptr) return;
  std::fwrite(text.data(), 1, text.size(), terminal_.file);
  std::fflush(terminal_.file);
  waiting_ = 0;
}

}  // namespace lockstep::detail
