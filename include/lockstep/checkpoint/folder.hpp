// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The folder in which a job keeps its checkpoints: which of them stay, and which is the
/// best.

#include <map>
#include <mutex>

#include "lockstep/checkpoint/options.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/utility.hpp"

namespace lockstep::detail {

/// Owns a folder for one job while it exists: an flock on its file `.lock`, in which the owner is
/// described. The system frees the lock of a process that is dead, however it died, so a job that
/// is started anew takes it at once.
class FolderLock {
 public:
  /// Throws where another job, of this process or another, has had the folder for `patience`: long
  /// enough for a process that is being killed to be gone.
  explicit FolderLock(const std::string& folder,
                      std::chrono::milliseconds patience = std::chrono::seconds(3));
  ~FolderLock();
  FolderLock(FolderLock&&) noexcept = default;
  FolderLock& operator=(FolderLock&&) = delete;

  /// Throws unless the folder is still the one that was locked: another may have been put in its
  /// place, with a lock of its own.
  void require() const;

 private:
  std::string folder_;
  std::string path_;
  Descriptor file_;
};

/// The options with their folder without slashes at its end, which would be doubled in paths.
/// Throws unless they can be meant: a program's numbers may be nonsense too.
CheckpointOptions plain_options(CheckpointOptions options);

inline constexpr std::string_view best_checkpoint_name = "best.safetensors";

/// The file of a checkpoint after so many updates, without its folder.
std::string checkpoint_name(std::uint64_t step);

/// After how many updates the checkpoint of this name was made; nothing if it is none.
std::optional<std::uint64_t> checkpoint_step(std::string_view name);

/// The checkpoint that a shard belongs to by its name, without `.safetensors`; empty if the name is
/// no shard's.
std::string_view shard_stem(std::string_view name);

/// The plain files in a folder, in no order; none where the folder cannot be read.
std::vector<std::string> files_in(const std::string& folder);

/// The steps of the checkpoints in a folder, the newest first.
std::vector<std::uint64_t> steps_in(const std::string& folder);

/// Hears of checkpoints that are passed over: `skipped(path, why)`.
using SkippedCheckpoint = FunctionRef<void(const std::string&, const std::string&)>;

/// The newest checkpoint of which every byte is as lockstep wrote it; `best.safetensors` comes
/// last.
std::optional<std::string> newest_valid_checkpoint(const std::string& folder,
                                                   SkippedCheckpoint skipped);

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
  std::string path_of(std::uint64_t step) const {
    return text({path(), "/", checkpoint_name(step)});
  }
  std::string best_path() const { return text({path(), "/", best_checkpoint_name}); }

  /// The newest valid checkpoint. Where its job died before it could be made the best copy, that is
  /// made up for.
  std::optional<std::string> newest_valid(SkippedCheckpoint skipped);

  /// The job begins after so many updates, 0 for a new one. Throws where the folder holds a later
  /// checkpoint: that is of another run, and this one's would be taken for older.
  void begin_at(std::uint64_t step);

  /// Throws where the folder was removed or replaced.
  void require() const { lock_.require(); }

  /// The checkpoint of this step is written. Removes what is older than the last that are to stay;
  /// only those that this job has written or verified count.
  void saved(std::uint64_t step);

  /// Makes the saved checkpoint of this step the best copy if the score that it was saved with is
  /// better than that of the best so far; NaN never is. Returns whether it was.
  bool offer_best(std::uint64_t step);

  /// The score of the best copy under the name of `best_by`, if it has one.
  std::optional<double> best_score() const;

 private:
  bool take_if_best(std::uint64_t step);
  /// Removes shards that no checkpoint names and, unless the job runs, temporaries. While it runs,
  /// shards of steps after the one that was saved last are those of ranks that are ahead.
  void remove_orphans(std::optional<std::uint64_t> saved = std::nullopt);
  /// False, with a word the first time, where the file cannot be removed.
  bool remove_file(const std::string& name);

  CheckpointOptions options_;
  FolderLock lock_;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, bool> is_valid_;  // of checkpoints that it has written or looked at
  std::optional<double> best_score_;
  bool has_complained_ = false;
};

}  // namespace lockstep::detail
