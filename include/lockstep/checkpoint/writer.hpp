// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Writes a job to files: every rank its own, together or beside training, and rank 0 commits
/// them.

#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/job.hpp"
#include "lockstep/checkpoint/options.hpp"
#include "lockstep/checkpoint/reader.hpp"
#include "lockstep/checkpoint/safetensors.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/thread.hpp"

namespace lockstep::detail {

/// Runs one piece of work at a time beside the thread that owns this object; only that thread calls
/// its functions. A failure is kept until it is thrown or taken. One that nobody has seen at the
/// end of this object is told as a late failure (`core/late_failure.hpp`).
class BackgroundWriter {
 public:
  explicit BackgroundWriter(Rank rank) : rank_(rank) {}
  /// **Host** blocks until the work under way is done.
  ~BackgroundWriter();
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  bool is_busy() const { return is_busy_.load(std::memory_order_acquire); }

  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  /// Throws the failure of work that has ended, once. A job calls it at every step.
  void rethrow() {
    if (has_failed()) [[unlikely]]
      throw_failure();
  }

  /// **Host** blocks until the work under way is done, and throws its failure.
  void wait();

  /// The failure of work that has ended, or null. It is not thrown any more.
  std::exception_ptr take_failure();

  /// Runs `work()` on a thread. Where other work is under way it waits for that or, with
  /// `WhenBusy::skip`, returns false. Throws the failure of earlier work, and then runs nothing.
  template <class Work>
  bool start(Work work, WhenBusy when_busy = WhenBusy::wait) {
    if (!is_free(when_busy)) return false;
    is_busy_.store(true, std::memory_order_relaxed);
    try {
      thread_ = Thread(
          ThreadName{"lockstep save", "the thread that writes a checkpoint"},
          [this, work = std::move(work)]() mutable {
            {
              Work mine = std::move(work);
              mine();
            }
            is_busy_.store(false, std::memory_order_release);
          },
          [this](std::exception_ptr thrown) { failed(std::move(thrown)); });
    } catch (...) {
      is_busy_.store(false, std::memory_order_relaxed);
      throw;
    }
    return true;
  }

 private:
  /// Can work be started now, after a wait where `when_busy` says so?
  bool is_free(WhenBusy when_busy);
  void failed(std::exception_ptr thrown);
  [[noreturn, gnu::cold]] void throw_failure();

  Rank rank_;
  std::atomic<bool> is_busy_ = false;
  std::atomic<bool> has_failed_ = false;
  std::exception_ptr failure_;  // written before has_failed_, read after it
  Thread thread_;
};

struct RankFile;

/// A `Saver` without the types of jobs.
class SaverCore {
 public:
  SaverCore();
  /// **Host** blocks until the save under way is written; where an exception drives this object out
  /// of its scope, rank 0 waits for no other rank's part.
  ~SaverCore();
  SaverCore(const SaverCore&) = delete;
  SaverCore& operator=(const SaverCore&) = delete;

  bool save(const StatefulJob& job, const std::string& path, const SaveOptions& options);
  void finish(const JointRanks& ranks);
  void rethrow() {
    if (writer_) writer_->rethrow();
  }
  bool is_busy() const { return writer_ && writer_->is_busy(); }
  bool has_failed() const { return writer_ && writer_->has_failed(); }

 private:
  std::shared_ptr<RankFile> collect(const StatefulJob& job, const std::string& path,
                                    const SaveOptions& options,
                                    const std::vector<std::string>& told);
  void add_tensors(const StatefulJob& job, bool copies_all, RankFile& file);
  void write_now(const StatefulJob& job, RankFile& file);
  void write_later(const StatefulJob& job, const std::shared_ptr<RankFile>& file);
  void give_up();

  std::optional<BackgroundWriter> writer_;
  SnapshotMemory snapshot_;
  std::atomic<bool> is_given_up_ = false;  // nobody needs the file that is being written
  EndOfScope scope_;
};

struct SaveAnnouncement {
  std::string_view path;
  std::string_view token;  // of the names of shards; rank 0's counts
  std::string_view values;
  bool is_busy = false;
  bool has_tensors = false;  // does this rank write a file?

  std::string packed() const {
    std::string text{is_busy ? '1' : '0', has_tensors ? '1' : '0'};
    for (const std::string_view piece : {path, token, values}) append_sized(text, piece);
    return text;
  }
  explicit SaveAnnouncement(std::string_view text)
      : is_busy(text[0] == '1'), has_tensors(text[1] == '1') {
    text.remove_prefix(2);
    path = take_sized(text);
    token = take_sized(text);
    values = take_sized(text);
  }
  SaveAnnouncement() = default;
};

/// Another rank's file beside that of rank 0.
struct ExpectedShard {
  std::size_t rank;
  std::string name;  // within the folder
};

/// The name of a rank's file, and a file in the folder of `path`. A token is new for every save, so
/// that nothing is overwritten.
std::string shard_name(std::string_view path, std::string_view token, std::size_t rank,
                       std::size_t world);
std::string beside(std::string_view path, std::string_view name);
void remove_beside(std::string_view path, std::string_view name);

/// The other ranks' files, which are there as soon as they are whole. Nothing where `is_given_up`
/// becomes true. **Host** blocks.
std::optional<std::vector<ShardFile>> await_shards(const std::string& path,
                                                   const std::vector<ExpectedShard>& expected,
                                                   const std::atomic<bool>& is_given_up);

/// Writes rank 0's file: with its rename all files are the checkpoint, and not before. Then removes
/// the shards of the file that it has replaced; where it fails, those of this one.
void commit(const std::string& path, FileToWrite& file, const std::vector<ShardFile>& shards);

/// The same, with all tensors in the one file. The parts, and rank 0's own that is `part`, are
/// removed.
void commit_whole(const std::string& path, const std::string& part, FileToWrite& file,
                  const std::vector<ShardFile>& shards);

}  // namespace lockstep::detail
