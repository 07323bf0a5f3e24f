// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The folder of a job's checkpoints: its lock, its file names, retention and the best copy.

#include <map>

#include "lockstep/detail/checkpoint/options.hpp"
#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/core/utility.hpp"

namespace lockstep::detail {

/// Locks a folder for one job: an flock on its file `.lock`, whose text describes the owner. The
/// kernel releases the lock of a dead process, so a restarted job takes the lock at once.
class FolderLock {
 public:
  /// Throws where another job holds the lock for `patience`, in which a killed process would exit.
  explicit FolderLock(const std::string& folder,
                      std::chrono::milliseconds patience = std::chrono::seconds(3));
  ~FolderLock();
  FolderLock(FolderLock&&) noexcept = default;
  FolderLock& operator=(FolderLock&&) = delete;

  /// Throws unless the folder is still the one that was locked: a replacement has another lock.
  void require() const;

 private:
  std::string folder_;
  std::string path_;
  Descriptor file_;
};

/// Checks the options and strips slashes from the end of the folder.
CheckpointOptions plain_options(CheckpointOptions options);

inline constexpr std::string_view best_checkpoint_name = "best.safetensors";

/// The file name of the checkpoint after `step` updates.
std::string checkpoint_name(std::uint64_t step);

/// The number of updates in a checkpoint's file name; nothing for other names.
std::optional<std::uint64_t> checkpoint_step(std::string_view name);

/// The stem of the checkpoint that a shard's name refers to; empty for other names.
std::string_view shard_stem(std::string_view name);

/// The regular files in a folder, unsorted; none where the folder cannot be read.
std::vector<std::string> files_in(const std::string& folder);

/// Called for every damaged checkpoint: `skipped(path, why)`.
using SkippedCheckpoint = FunctionRef<void(const std::string&, const std::string&)>;

/// The newest checkpoint whose checksums all match; `best.safetensors` comes last.
std::optional<std::string> newest_valid_checkpoint(const std::string& folder,
                                                   SkippedCheckpoint skipped);

/// The folder of a running job: rank 0 has one, which holds the lock. Thread-safe. Order of calls:
/// `newest_valid` if the job resumes, `begin_at`, then for every checkpoint `require`, writing
/// `path_of(step)`, `saved` and, for a new best score, `offer_best`.
class CheckpointFolder {
 public:
  /// Creates and locks the folder; removes dead jobs' temporaries and shards without a checkpoint.
  explicit CheckpointFolder(CheckpointOptions options,
                            std::chrono::milliseconds patience = std::chrono::seconds(3));

  const std::string& path() const { return options_.folder; }
  std::string path_of(std::uint64_t step) const {
    return text({path(), "/", checkpoint_name(step)});
  }
  std::string best_path() const { return text({path(), "/", best_checkpoint_name}); }

  /// The newest valid checkpoint. Makes it the best copy if it is one and its job died before that.
  std::optional<std::string> newest_valid(SkippedCheckpoint skipped);

  /// Throws where the folder holds a checkpoint of a step after `step` that is not known to be
  /// damaged: it is another run's, and would be taken for newer than this run's.
  void begin_at(std::uint64_t step);

  void require() const { lock_.require(); }

  /// Notes that the checkpoint of this step is written, and removes those beyond `keep` as well as
  /// damaged ones. Only checkpoints that this job has written or verified count towards `keep`.
  void saved(std::uint64_t step);

  /// Makes this checkpoint the best copy, and returns true, if its score is better (NaN never is).
  bool offer_best(std::uint64_t step);

  /// The score named `best_by` of the best copy, if it has one.
  std::optional<double> best_score() const {
    const std::lock_guard lock(mutex_);
    return best_score_;
  }

 private:
  bool take_if_best(std::uint64_t step);
  /// Removes shards that no checkpoint names and, before the job runs, temporaries. While the job
  /// runs, shards of later steps than `saved` stay: ranks that are ahead write them.
  void remove_orphans(std::optional<std::uint64_t> saved = std::nullopt);
  /// Returns false where the file cannot be removed, with one message per folder.
  bool remove_file(const std::string& name);

  CheckpointOptions options_;
  FolderLock lock_;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, bool> is_valid_;  // of checkpoints that this job has written or verified
  std::optional<double> best_score_;
  bool has_complained_ = false;
};

}  // namespace lockstep::detail
