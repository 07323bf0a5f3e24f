// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `checkpoint_plan.hpp`.

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include "lockstep/checkpoint/folder.hpp"
#include "lockstep/checkpoint/folder_names.hpp"
#include "lockstep/checkpoint/reader.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/launch/launch.hpp"
#include "lockstep/trainer/checkpoint_contents.hpp"
#include "lockstep/trainer/checkpoint_plan.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE void say(const std::string& line) {
  std::fputs(text({"lockstep: ", line, "\n"}).c_str(), stderr);
}

LOCKSTEP_INLINE CheckpointPlan::CheckpointPlan(CheckpointOptions options)
    : options_(std::move(options)) {
  require_checkpoint_options(options_);
  while (options_.folder.size() > 1 && options_.folder.back() == '/') options_.folder.pop_back();
}

LOCKSTEP_INLINE std::string CheckpointPlan::path_of(std::uint64_t updates) const {
  return text({options_.folder, "/", checkpoint_name(updates)});
}

/// What rank 0 tells the others of the best score in the folder: the score's bytes, or nothing.
LOCKSTEP_INLINE std::string CheckpointPlan::told_best() const {
  const auto known = folder_ ? folder_->best_score() : std::nullopt;
  if (!known) return {};
  return {reinterpret_cast<const char*>(&*known), sizeof *known};
}

LOCKSTEP_INLINE void CheckpointPlan::learn_best(const std::string& told) {
  best_.reset();
  if (told.size() != sizeof(double)) return;
  best_.emplace();
  std::memcpy(&*best_, told.data(), sizeof(double));
}

LOCKSTEP_INLINE void CheckpointPlan::open(const JointRanks& ranks) {
  learn_best(store_together(ranks, "checkpoints", [&] {
    if (ranks.rank == Rank{0}) folder_ = std::make_shared<CheckpointFolder>(options_);
    return told_best();
  })[0]);
}

LOCKSTEP_INLINE bool CheckpointPlan::resumes() const {
  return options_.resume || restart_count() != 0;
}

/// Checkpoints of a folder that are damaged. Where all of them are, their job must not start anew:
/// it would replace the only files from which something might still be saved.
class DamagedCheckpoints {
 public:
  void add(const std::string& path, const std::string& why) {
    say(text({"'", path, "' is passed over: ", why}));
    names_.append(names_.empty() ? "'" : ", '").append(name_in_folder(path)).append("'");
  }
  /// Throws if there are any. `operation` is "launch" for how the job was started: launchers do not
  /// start it again, because it would fail again.
  void require_none(std::string_view operation, const std::string& folder) const {
    if (names_.empty()) return;
    fail(operation, {"no checkpoint in '", folder, "' is valid: ", names_},
         "put back a copy of one, or name another folder to start anew; nothing was deleted");
  }

 private:
  std::string names_;
};

LOCKSTEP_INLINE std::optional<std::string> CheckpointPlan::find_newest(const JointRanks& ranks) {
  std::string found = store_together(ranks, "checkpoints", [&] {
    if (ranks.rank != Rank{0}) return std::string();
    DamagedCheckpoints damaged;
    const auto newest = folder_->newest_valid(
        [&](const std::string& path, const std::string& why) { damaged.add(path, why); });
    if (!newest) damaged.require_none("launch", options_.folder);
    if (!newest) say(text({"no checkpoint in '", options_.folder, "': training starts anew"}));
    return newest ? newest->path : std::string();
  })[0];
  if (found.empty()) return std::nullopt;
  return found;
}

LOCKSTEP_INLINE void CheckpointPlan::begin(const JointRanks& ranks, std::uint64_t updates,
                                           const Resumed* resumed) {
  updates_ = updates;
  saved_ = looked_ = Clock::now();
  // Looking for the newest checkpoint may have made a best copy that a job died before.
  learn_best(store_together(ranks, "checkpoints", [&] {
    if (ranks.rank != Rank{0}) return std::string();
    folder_->begin_at(updates);
    if (resumed != nullptr) {
      // Between two epochs none is under way, and after the last one none comes.
      const std::uint64_t begun = begun_epochs(*resumed);
      say(text({"resumed from '", resumed->path, "', ",
                begun == 0 ? "before the first epoch"
                           : text({resumed->position ? "epoch " : "after epoch ", begun}),
                ", step ", resumed->step}));
      for (const std::string& note : resumed->notes) say(note);
    }
    return told_best();
  })[0]);
}

LOCKSTEP_INLINE CheckpointPlan::RanksLook CheckpointPlan::own_look(std::size_t world) {
  const Clock::time_point now = Clock::now();
  RanksLook mine;
  mine.signal = stop_request_.signal();
  mine.is_due = options_.every_time.count() != 0 && now - saved_ >= options_.every_time ? 1 : 0;
  // A look costs the ranks a meeting, so there are about four in a second. No look is more than 64
  // updates away, since updates may suddenly take long.
  const double seconds = std::chrono::duration<double>(now - looked_).count();
  const double wanted = 0.25 / std::max(seconds / static_cast<double>(updates_per_look_), 1e-9);
  const double most = world == 1 ? 1 : std::min(2.0 * static_cast<double>(updates_per_look_), 64.0);
  mine.updates_per_look = static_cast<std::uint64_t>(std::clamp(wanted, 1.0, most));
  looked_ = now;
  return mine;
}

LOCKSTEP_INLINE void CheckpointPlan::add_look(RanksLook& all, const std::string& told) {
  RanksLook other;
  std::memcpy(&other, told.data(), sizeof other);
  if (all.signal == 0) all.signal = other.signal;
  all.is_due = std::max(all.is_due, other.is_due);
  all.updates_per_look = std::min(all.updates_per_look, other.updates_per_look);
}

LOCKSTEP_INLINE bool CheckpointPlan::take_look(const RanksLook& all) {
  signal_ = all.signal;
  until_look_ = updates_per_look_ = all.updates_per_look;
  return all.is_due != 0;
}

LOCKSTEP_INLINE WantedSave CheckpointPlan::after_epoch(const JointRanks& ranks, bool is_best,
                                                       bool is_last) {
  const bool is_due = look(ranks.world, ranks.gather);
  if (signal_ != 0) return WantedSave::stop;
  const bool every_epoch = options_.every_steps == 0 && options_.every_time.count() == 0;
  return is_due || is_best || is_last || every_epoch ? WantedSave::save : WantedSave::none;
}

LOCKSTEP_INLINE std::optional<double> CheckpointPlan::score_in(const Scores& scores) const {
  if (options_.best_by.empty()) return std::nullopt;
  std::string names;
  for (const Score& score : scores) {
    if (score.name == options_.best_by) return score.mean;
    names.append(names.empty() ? "" : ", ").append(score.name);
  }
  fail("checkpoints",
       {"the epoch has no score '", options_.best_by, "' to choose the best by; it has ",
        names.empty() ? "none" : names},
       "evaluate in every epoch, and name one of its scores");
}

LOCKSTEP_INLINE bool CheckpointPlan::is_better(double score) const {
  if (std::isnan(score)) return false;
  return !best_ || (options_.prefers_higher() ? score > *best_ : score < *best_);
}

LOCKSTEP_INLINE void CheckpointPlan::prepare(const JointRanks& ranks, std::uint64_t updates,
                                             std::optional<double> score, SaveOptions& options) {
  store_together(ranks, "checkpoints", [&] {
    if (folder_) folder_->require();
    return std::string();
  });
  if (score) best_ = score;
  saved_ = Clock::now();
  if (!options_.best_by.empty()) options.best = best_;
  // The best one is never left out: it would not come again.
  options.when_busy = score || !options.asynchronous ? WhenBusy::wait : options_.when_busy;
  if (folder_) {
    options.written = [folder = folder_, updates, score] {
      folder->saved(updates);
      if (score) folder->offer_best(updates, *score);
    };
  }
}

LOCKSTEP_INLINE int CheckpointPlan::stop() {
  stop_request_.finished();
  return signal_;
}

LOCKSTEP_INLINE std::string checkpoint_at(const JointRanks& ranks, const std::string& where) {
  return store_together(ranks, "resume", [&] {
    if (ranks.rank != Rank{0}) return std::string();
    struct stat status{};
    if (::stat(where.c_str(), &status) != 0) {
      fail("resume", {"'", where, "' cannot be read: ", error_text(errno)},
           "name a checkpoint or a folder of them, or leave resume out to start anew");
    }
    if (!S_ISDIR(status.st_mode)) return where;
    DamagedCheckpoints damaged;
    const auto newest = newest_valid_checkpoint(
        where, verify_checkpoint, [&](const FoundCheckpoint& passed, const std::string& why) {
          damaged.add(passed.path, why);
        });
    if (!newest) {
      damaged.require_none("resume", where);
      fail("resume", {"there is no checkpoint in '", where, "'"},
           "name another folder, or leave resume out to start anew");
    }
    return newest->path;
  })[0];
}

LOCKSTEP_INLINE bool tells_course(const std::string& path) {
  try {
    const CheckpointReader reader(path);
    if (!reader.is_lockstep()) return false;
    for (const SavedValue& value : read_common_values(reader))
      if (value.name == "lockstep/run") return true;
    return false;
  } catch (const Error&) {
    return true;  // who loads it says what is wrong
  }
}

LOCKSTEP_INLINE bool has_course(const JointRanks& ranks, const std::string& path) {
  return !store_together(
              ranks, "resume",
              [&] {
                return std::string(ranks.rank == Rank{0} && tells_course(path) ? "1" : "");
              })[0]
              .empty();
}

LOCKSTEP_INLINE std::optional<std::string> CheckpointPlan::latest() const {
  const auto found = list_checkpoints(options_.folder);
  if (found.empty()) return std::nullopt;
  return found.front().path;
}

LOCKSTEP_INLINE std::optional<std::string> CheckpointPlan::best_path() const {
  std::string path = text({options_.folder, "/", best_checkpoint_name});
  if (::access(path.c_str(), F_OK) != 0) return std::nullopt;
  return path;
}

}  // namespace lockstep::detail
