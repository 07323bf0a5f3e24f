// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `options.hpp`.

#include <charconv>
#include <cmath>
#include <utility>

#include "lockstep/checkpoint/options.hpp"
#include "lockstep/core/error.hpp"

namespace lockstep {

LOCKSTEP_INLINE bool CheckpointOptions::prefers_higher() const {
  if (higher_is_better) return *higher_is_better;
  for (const std::string_view word : {"loss", "error", "perplexity"}) {
    if (best_by.find(word) != std::string::npos) return false;
  }
  return true;
}

namespace detail {

[[noreturn]] LOCKSTEP_INLINE void fail_checkpoint_flag(std::string_view name,
                                                       std::string_view value,
                                                       std::string_view advice) {
  fail("launch", {name, " is '", value, "'"}, advice);
}

/// The value of an option, `text`, is a number above 0 and the letter `unit`, if that is one.
template <class Number>
Number parse_positive(std::string_view name, std::string_view text, std::string_view advice,
                      char unit = '\0') {
  Number number = 0;
  const std::string_view digits = text.substr(0, text.size() - (unit == '\0' ? 0 : 1));
  const char* const last = digits.data() + digits.size();
  // NOLINTNEXTLINE(bugprone-suspicious-stringview-data-usage): `last` is where it ends
  const auto [end, error] = std::from_chars(digits.data(), last, number);
  if (error == std::errc::result_out_of_range) {
    fail_checkpoint_flag(name, text, "this is more than can be counted; give a smaller number");
  }
  if (error != std::errc{} || end != last || !(number > 0)) {
    fail_checkpoint_flag(name, text, advice);
  }
  return number;
}

LOCKSTEP_INLINE CheckpointFlags::Every parse_checkpoint_interval(std::string_view name,
                                                                 std::string_view text) {
  constexpr std::string_view advice =
      "give it a time above 0, such as 30s, 5m or 1h, or a number of updates from 1, such as 100";
  if (text.empty()) fail_checkpoint_flag(name, text, advice);
  constexpr std::pair<char, double> units[] = {{'s', 1}, {'m', 60}, {'h', 3600}, {'d', 86400}};
  for (const auto& [letter, seconds] : units) {
    if (text.back() != letter) continue;
    const double count = parse_positive<double>(name, text, advice, letter);
    // Beyond a thousand years the clock's arithmetic would overflow, and `inf` is a number too.
    if (!(count * seconds < 3.2e10)) {
      fail_checkpoint_flag(name, text, "no run is as long as that; give a shorter time");
    }
    const double milliseconds = std::ceil(count * seconds * 1000);
    return {0, std::chrono::milliseconds(static_cast<std::int64_t>(milliseconds))};
  }
  return {parse_positive<std::uint64_t>(name, text, advice), {}};
}

LOCKSTEP_INLINE bool CheckpointFlags::any() const {
  return folder || every || keep || best_by || resume;
}

LOCKSTEP_INLINE CheckpointFlags parse_checkpoint_flags(std::span<const CutArguments::Given> given) {
  CheckpointFlags flags;
  for (const auto& [name, value] : given) {
    if (name == "--resume") flags.resume = true;
    if (name == "--checkpoint-every") flags.every = parse_checkpoint_interval(name, value);
    if (name == "--checkpoint") {
      if (value.empty()) fail_checkpoint_flag(name, value, "name a folder");
      if (value.starts_with("--")) {
        fail_checkpoint_flag(name, value, "name a folder; one of that name is ./--...");
      }
      flags.folder = value;
    }
    if (name == "--keep") {
      flags.keep = value == "all" ? keep_all
                                  : parse_positive<std::size_t>(
                                        name, value,
                                        "give the number of checkpoints that stay, from 1, or all");
    }
    if (name == "--best") {
      const std::size_t colon = value.rfind(':');
      const std::string_view side =
          colon == std::string_view::npos ? std::string_view() : value.substr(colon + 1);
      const std::string_view score = value.substr(0, colon);
      if (side == "lower" || side == "higher") flags.higher_is_better = side == "higher";
      if (score.empty() || (!flags.higher_is_better && colon != std::string_view::npos)) {
        fail_checkpoint_flag(name, value,
                             "name a score, such as test_accuracy, or wer:lower or f1:higher");
      }
      flags.best_by = score;
    }
  }
  return flags;
}

LOCKSTEP_INLINE CheckpointOptions CheckpointFlags::over(CheckpointOptions options) const {
  if (folder) options.folder = *folder;
  if (options.folder.empty() && any()) {
    fail("launch",
         {resume    ? "--resume"
          : every   ? "--checkpoint-every"
          : best_by ? "--best"
                    : "--keep",
          " is given without --checkpoint"},
         "add --checkpoint DIR, the folder of the checkpoints");
  }
  if (every) {
    options.every_steps = every->steps;
    options.every_time = every->time;
  }
  if (keep) options.keep = *keep;
  if (best_by) {
    options.best_by = *best_by;
    options.higher_is_better = higher_is_better;
  }
  options.resume = options.resume || resume;
  return options;
}

LOCKSTEP_INLINE void require_checkpoint_options(const CheckpointOptions& options) {
  if (options.folder.empty()) {
    fail("checkpoints", {"no folder is named"}, "set CheckpointOptions::folder, or --checkpoint");
  }
  if (options.keep == 0) {
    fail("checkpoints", {"keep is 0, so that every checkpoint would be deleted"},
         "keep at least 1, or keep_all");
  }
  if (options.every_time.count() < 0) {
    fail("checkpoints", {"every_time is ", options.every_time.count(), " ms"},
         "give it a time above 0, or leave it out");
  }
}

}  // namespace detail

}  // namespace lockstep
