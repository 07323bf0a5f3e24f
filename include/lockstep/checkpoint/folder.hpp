// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The folder in which a job keeps its checkpoints: which of them stay, and which is the
/// best.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/folder_names.hpp"
#include "lockstep/checkpoint/lock.hpp"
#include "lockstep/checkpoint/options.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/utility.hpp"

namespace lockstep::detail {

/// Throws an `Error` unless every byte of a checkpoint is as lockstep wrote it.
void verify_checkpoint(const std::string& path);

/// A job's folder, while the job has it: rank 0 makes one, which holds the folder's lock. Threads
/// may share it.
///
/// The order of things: `newest_valid` where the job resumes, `begin_at`, and then, for every
/// checkpoint, `require`, the writing of `path_of(step)`, `saved` and perhaps `offer_best`.
class CheckpointFolder {
 public:
  /// Makes the folder where there is none, locks it, and removes what jobs that died left half
  /// written: temporaries, and shards that no checkpoint names.
  explicit CheckpointFolder(CheckpointOptions options,
                            std::chrono::milliseconds patience = std::chrono::seconds(3));

  const std::string& path() const { return options_.folder; }
  std::string path_of(std::uint64_t step) const;
  std::string best_path() const;

  /// Was the folder made by this object?
  bool is_new() const { return is_new_; }

  /// The newest valid checkpoint. `skipped(path, why)` hears of the others that were tried. Where
  /// its job died before it could be made the best copy, that is made up for.
  std::optional<FoundCheckpoint> newest_valid(
      FunctionRef<void(const std::string&, const std::string&)> skipped);

  /// The job begins after so many updates, 0 for a new one. Throws where the folder holds a later
  /// checkpoint: that is of another run, and this one's would be taken for older.
  void begin_at(std::uint64_t step);

  /// Throws where the folder was removed or replaced.
  void require() const { lock_.require(); }

  /// The checkpoint of this step is written. Removes what is older than the last that are to stay;
  /// only those that this job has written or verified count.
  void saved(std::uint64_t step);

  /// Makes the saved checkpoint of this step the best copy if its score is better than that of the
  /// best so far; NaN never is. Returns whether it was.
  bool offer_best(std::uint64_t step, double score);

  /// The score of the best copy, where that is known by the name of `best_by`.
  std::optional<double> best_score() const;

  /// The newest checkpoint that this job has written or verified.
  std::optional<FoundCheckpoint> latest() const;

 private:
  enum class Standing : std::uint8_t { valid, invalid };
  struct Known {
    std::uint64_t step;
    Standing standing;
  };

  std::optional<Standing> standing_of(std::uint64_t step) const;
  void note(std::uint64_t step, Standing standing);
  bool take_if_best(std::uint64_t step, double score);
  void clean_up();
  void keep_newest();
  void remove(std::uint64_t step, const std::vector<std::string>& of_best);
  /// The shards of the best copy: none where there is no copy, nothing where it cannot be read.
  std::optional<std::vector<std::string>> best_shards() const;
  /// False, with a word the first time, where the file cannot be removed.
  bool remove_file(const std::string& name);

  CheckpointOptions options_;
  bool is_new_;
  FolderLock lock_;
  mutable std::mutex mutex_;
  std::vector<Known> known_;
  std::optional<double> best_score_;
  bool has_complained_ = false;
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/checkpoint/folder.ipp"
#endif
