// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `folder.hpp`.

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <utility>

#include "lockstep/checkpoint/best_copy.hpp"
#include "lockstep/checkpoint/folder.hpp"
#include "lockstep/checkpoint/reader.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"

namespace lockstep::detail {

/// `folder` without slashes at its end, which would be doubled in paths.
LOCKSTEP_INLINE CheckpointOptions with_plain_folder(CheckpointOptions options) {
  require_checkpoint_options(options);
  while (options.folder.size() > 1 && options.folder.back() == '/') options.folder.pop_back();
  return options;
}

LOCKSTEP_INLINE void verify_checkpoint(const std::string& path) {
  const CheckpointReader reader(path);
  if (!reader.is_lockstep()) {
    fail("checkpoints", {"'", path, "' was not written by lockstep"},
         "load its parameters with load_parameters");
  }
  reader.verify();
}

/// The names of a checkpoint's shards, whether or not they are there.
LOCKSTEP_INLINE std::vector<std::string> shard_names(const std::string& path) {
  const SafetensorsFile main(path);
  std::vector<std::string> names;
  for (ShardFile& shard : shards_in(main.facts())) names.push_back(std::move(shard.name));
  return names;
}

/// The score of this name that a checkpoint was saved with.
LOCKSTEP_INLINE std::optional<double> recorded_score(const std::string& path,
                                                     std::string_view name) {
  const SafetensorsFile main(path);
  const auto scores = main.facts().find("scores");
  const auto score = scores ? scores->find(name) : std::nullopt;
  return score ? std::optional(score->at("mean").real()) : std::nullopt;
}

LOCKSTEP_INLINE bool contains(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

LOCKSTEP_INLINE CheckpointFolder::CheckpointFolder(CheckpointOptions options,
                                                   std::chrono::milliseconds patience)
    : options_(with_plain_folder(std::move(options))),
      is_new_(make_folder("checkpoints", options_.folder)),
      lock_(options_.folder, patience) {
  clean_up();
  if (!options_.best_by.empty()) best_score_ = read_best_score(path(), options_.best_by);
}

LOCKSTEP_INLINE std::string CheckpointFolder::path_of(std::uint64_t step) const {
  return text({path(), "/", checkpoint_name(step)});
}

LOCKSTEP_INLINE std::string CheckpointFolder::best_path() const {
  return text({path(), "/", best_checkpoint_name});
}

LOCKSTEP_INLINE std::optional<FoundCheckpoint> CheckpointFolder::newest_valid(
    FunctionRef<void(const std::string&, const std::string&)> skipped) {
  const std::lock_guard lock(mutex_);
  auto found = newest_valid_checkpoint(
      path(), verify_checkpoint, [&](const FoundCheckpoint& candidate, const std::string& why) {
        if (candidate.step) note(*candidate.step, Standing::invalid);
        skipped(candidate.path, why);
      });
  if (!found || !found->step) return found;
  note(*found->step, Standing::valid);
  if (options_.best_by.empty()) return found;
  if (const auto score = recorded_score(found->path, options_.best_by)) {
    take_if_best(*found->step, *score);
  }
  return found;
}

LOCKSTEP_INLINE void CheckpointFolder::begin_at(std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  for (const FoundCheckpoint& found : list_checkpoints(path())) {
    const std::uint64_t later = found.step.value_or(0);
    if (later <= step || standing_of(later) == Standing::invalid) continue;
    // An error of how the job was started. Launchers do not repeat these: the second start would go
    // on from a checkpoint that nobody has asked for.
    fail("launch",
         {"'", path(), "' holds a checkpoint of step ", later, ", and this job begins at step ",
          step},
         "add --resume to go on from there, or name another folder");
  }
}

LOCKSTEP_INLINE void CheckpointFolder::saved(std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  note(step, Standing::valid);
  keep_newest();
}

LOCKSTEP_INLINE bool CheckpointFolder::offer_best(std::uint64_t step, double score) {
  const std::lock_guard lock(mutex_);
  return take_if_best(step, score);
}

LOCKSTEP_INLINE bool CheckpointFolder::take_if_best(std::uint64_t step, double score) {
  if (std::isnan(score)) return false;
  const bool is_better =
      !best_score_ || (options_.prefers_higher() ? score > *best_score_ : score < *best_score_);
  if (!is_better) return false;
  lock_.require();
  const auto shards_before = best_shards();
  replace_best_copy(path(), path_of(step), options_.best_by, score);
  best_score_ = score;
  // Shards that only the best copy before has named are not needed any more.
  const auto shards = best_shards();
  if (!shards_before || !shards) return true;
  for (const std::string& name : *shards_before) {
    const std::string main = text({path(), "/", shard_stem(name), ".safetensors"});
    if (!contains(*shards, name) && ::access(main.c_str(), F_OK) != 0) remove_file(name);
  }
  return true;
}

LOCKSTEP_INLINE std::optional<double> CheckpointFolder::best_score() const {
  const std::lock_guard lock(mutex_);
  return best_score_;
}

LOCKSTEP_INLINE std::optional<FoundCheckpoint> CheckpointFolder::latest() const {
  const std::lock_guard lock(mutex_);
  for (const FoundCheckpoint& found : list_checkpoints(path())) {
    if (standing_of(found.step.value_or(0)) == Standing::valid) return found;
  }
  return std::nullopt;
}

LOCKSTEP_INLINE std::optional<CheckpointFolder::Standing> CheckpointFolder::standing_of(
    std::uint64_t step) const {
  for (const Known& known : known_) {
    if (known.step == step) return known.standing;
  }
  return std::nullopt;
}

LOCKSTEP_INLINE void CheckpointFolder::note(std::uint64_t step, Standing standing) {
  std::erase_if(known_, [&](const Known& known) { return known.step == step; });
  known_.push_back({step, standing});
}

LOCKSTEP_INLINE std::optional<std::vector<std::string>> CheckpointFolder::best_shards() const {
  const std::string best = best_path();
  if (::access(best.c_str(), F_OK) != 0) return std::vector<std::string>();
  try {
    return shard_names(best);
  } catch (const Error&) {
    return std::nullopt;
  }
}

LOCKSTEP_INLINE void CheckpointFolder::clean_up() {
  // What a checkpoint names is needed. Of one that cannot be read nobody knows what it names.
  std::vector<std::string> needed;
  std::vector<std::string> unreadable;
  const std::vector<std::string> names = files_in(path());
  for (const std::string& name : names) {
    const bool is_best = name == best_checkpoint_name;
    if (!is_best && !checkpoint_step(name)) continue;
    try {
      const std::vector<std::string> shards = shard_names(text({path(), "/", name}));
      needed.insert(needed.end(), shards.begin(), shards.end());
    } catch (const Error&) {
      unreadable.push_back(name);
    }
  }
  for (const std::string& name : names) {
    const std::string main = text({shard_stem(name), ".safetensors"});
    const bool is_shard = checkpoint_step(main).has_value();
    const bool is_orphan = is_shard && !contains(needed, name) && !contains(unreadable, main) &&
                           !contains(unreadable, best_checkpoint_name);
    if (is_orphan || is_temporary_name(name)) remove_file(name);
  }
}

LOCKSTEP_INLINE void CheckpointFolder::keep_newest() {
  const std::vector<FoundCheckpoint> all = list_checkpoints(path());
  std::size_t valid = 0;
  for (const FoundCheckpoint& found : all) {
    valid += standing_of(found.step.value_or(0)) == Standing::valid ? 1 : 0;
  }
  if (valid < options_.keep) return;
  // The best copy's shards have the name of a checkpoint, and stay without it. Nobody knows which
  // they are where the copy cannot be read.
  const auto of_best = best_shards();
  if (!of_best) return;
  valid = 0;
  for (const FoundCheckpoint& found : all) {
    const std::uint64_t step = found.step.value_or(0);
    const std::optional<Standing> standing = standing_of(step);
    const bool is_over = valid >= options_.keep || standing == Standing::invalid;
    valid += standing == Standing::valid ? 1 : 0;
    if (is_over) remove(step, *of_best);
  }
}

LOCKSTEP_INLINE void CheckpointFolder::remove(std::uint64_t step,
                                              const std::vector<std::string>& of_best) {
  const std::string main = checkpoint_name(step);
  // The checkpoint before its shards: a job that dies in between leaves no checkpoint without them.
  if (!remove_file(main)) return;
  std::erase_if(known_, [&](const Known& known) { return known.step == step; });
  for (const std::string& name : files_in(path())) {
    const bool is_shard = text({shard_stem(name), ".safetensors"}) == main;
    if (is_shard && !contains(of_best, name)) remove_file(name);
  }
}

LOCKSTEP_INLINE bool CheckpointFolder::remove_file(const std::string& name) {
  const std::string file = text({path(), "/", name});
  if (::unlink(file.c_str()) == 0 || errno == ENOENT) return true;
  const int error = errno;
  // Training can go on beside a file too many, but whoever runs it should know.
  if (!std::exchange(has_complained_, true)) {
    std::fputs(
        text({"lockstep: checkpoints: '", file, "' cannot be removed: ", error_text(error), "\n"})
            .c_str(),
        stderr);
  }
  return false;
}

}  // namespace lockstep::detail
