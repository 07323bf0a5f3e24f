// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The folder in which a job keeps its checkpoints: which of them stay, and which is the
/// best.

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/options.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/standard.hpp"
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

inline constexpr std::string_view best_checkpoint_name = "best.safetensors";

/// The file of a checkpoint after so many updates, without its folder.
std::string checkpoint_name(std::uint64_t step);

/// After how many updates the checkpoint of this name was made; nothing if it is none.
std::optional<std::uint64_t> checkpoint_step(std::string_view name);

/// The checkpoint that a shard belongs to by its name, without `.safetensors`; empty if the name is
/// no shard's.
std::string_view shard_stem(std::string_view name);

/// Is this a file that was being written, or a copy that was being made?
bool is_temporary_name(std::string_view name);

/// A checkpoint in a folder. Of `best.safetensors` the step is not known from its name.
struct FoundCheckpoint {
  std::string path;
  std::optional<std::uint64_t> step;

  bool operator==(const FoundCheckpoint&) const = default;
};

/// The plain files in a folder, in no order; none where the folder cannot be read.
std::vector<std::string> files_in(const std::string& folder);

/// The checkpoints in a folder, the newest first, without `best.safetensors`.
std::vector<FoundCheckpoint> list_checkpoints(const std::string& folder);

/// The newest checkpoint for which `verify(path)` throws no `Error`; `best.safetensors` comes last.
/// `skipped(path, why)` is called for each that is passed over.
std::optional<FoundCheckpoint> newest_valid_checkpoint(
    const std::string& folder, FunctionRef<void(const std::string&)> verify,
    FunctionRef<void(const FoundCheckpoint&, const std::string&)> skipped);

/// The score of `folder`'s best copy under this name, if it is known.
std::optional<double> read_best_score(const std::string& folder, std::string_view name);

/// Makes `checkpoint`, a file in `folder`, its best copy, with this score. Whoever reads the copy
/// finds the one before or this one.
void replace_best_copy(const std::string& folder, const std::string& checkpoint,
                       std::string_view name, double score);

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
