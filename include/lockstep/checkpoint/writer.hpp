// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `save` and `Saver`: every rank writes its own file, together or beside training, and rank
/// 0 commits them.

#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/job.hpp"
#include "lockstep/checkpoint/options.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/thread.hpp"

namespace lockstep::detail {

/// Runs one piece of work at a time beside the thread that owns this object; only that thread calls
/// its functions. A failure is kept until it is thrown or taken. One that nobody has seen at the
/// end of this object is told as a late failure (`core/scope_guard.hpp`).
class BackgroundWriter {
 public:
  /// `alarm` is set as well when work has failed.
  explicit BackgroundWriter(Rank rank, std::atomic<bool>* alarm = nullptr)
      : rank_(rank), alarm_(alarm) {}
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

  /// Runs `work()` on a thread, after the work under way. Throws the failure of earlier work, and
  /// then runs nothing.
  template <class Work>
  void start(Work work) {
    wait();
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
  }

 private:
  void failed(std::exception_ptr thrown);
  [[noreturn, gnu::cold]] void throw_failure();

  Rank rank_;
  std::atomic<bool>* alarm_;
  std::atomic<bool> is_busy_ = false;
  std::atomic<bool> has_failed_ = false;
  std::exception_ptr failure_;  // written before has_failed_, read after it
  Thread thread_;
};

struct RankFile;

/// A `Saver` without the types of jobs.
class StateWriter {
 public:
  /// `alarm` is set when a thread has failed to write: for whoever does not ask at every step.
  explicit StateWriter(std::atomic<bool>* alarm = nullptr) : alarm_(alarm) {}
  /// **Host** blocks until the save under way is written; where an exception drives this object out
  /// of its scope, rank 0 waits for no other rank's part.
  ~StateWriter();
  StateWriter(const StateWriter&) = delete;
  StateWriter& operator=(const StateWriter&) = delete;

  bool save_job(const StatefulJob& job, const std::string& path, const SaveOptions& options);
  void finish_with(const JointRanks& ranks);
  /// Throws the failure of an asynchronous save of this rank that has ended; the other ranks, which
  /// do not know of it, are told.
  void rethrow_on_all(const StatefulJob& job);
  /// The same, and they are not told.
  void rethrow() {
    if (writer_) writer_->rethrow();
  }
  /// Is this rank's part of a save still being written?
  bool is_busy() const { return writer_ && writer_->is_busy(); }

 private:
  std::shared_ptr<RankFile> collect(const StatefulJob& job, const std::string& path,
                                    const SaveOptions& options,
                                    const std::vector<std::string>& told);
  void add_tensors(const StatefulJob& job, bool copies_all, RankFile& file);
  void write_now(const StatefulJob& job, RankFile& file);
  void write_later(const StatefulJob& job, const std::shared_ptr<RankFile>& file);
  void give_up();

  std::atomic<bool>* alarm_;
  std::optional<BackgroundWriter> writer_;
  SnapshotMemory snapshot_;
  std::atomic<bool> is_given_up_ = false;  // nobody needs the file that is being written
  EndOfScope scope_;
};

}  // namespace lockstep::detail

namespace lockstep {

/// Writes checkpoints of one job, one after the other; its memory and thread serve all of them. It
/// must not outlive the wrapper.
///
///     Saver saver;
///     for (const auto& batch : loader) {
///       ddp.step(batch);
///       if (ddp.updates() % 1000 == 0) saver.save(ddp, path, {.asynchronous = true});
///     }
///     saver.finish(ddp);
class Saver : private detail::StateWriter {
 public:
  /// Saves the job as it is now: parameters, buffers, which are synchronised first, the optimizer
  /// and what the options have. The file is replaced as a whole or stays as it is. An asynchronous
  /// save returns when all that is saved was copied. False where it was skipped. An error between
  /// the micro-batches of a step, whose gradients are no part of a checkpoint.
  ///
  /// What goes wrong on one rank is the same error on all, and the job may go on. An error of an
  /// asynchronous save is thrown by the next `save`, `finish` or `rethrow`.
  ///
  /// **Ranks** all, with the same path. **Host** blocks, as said. **Stream** after all steps so
  /// far.
  template <class Wrapper>
  bool save(Wrapper& wrapped, const std::string& path, const SaveOptions& options = {}) {
    bool is_saved = false;
    detail::with_job(wrapped, detail::JobCall::save, [&](const detail::StatefulJob& job) {
      is_saved = save_job(job, path, options);
    });
    return is_saved;
  }

  /// Waits until all is written. **Ranks** all. **Host** blocks.
  template <class Wrapper>
  void finish(Wrapper& wrapped) {
    detail::with_job(wrapped, detail::JobCall::save,
                     [&](const detail::StatefulJob& job) { finish_with(job.ranks); });
  }

  using StateWriter::is_busy;
  using StateWriter::rethrow;
};

/// Saves a wrapped model with its optimizer: `save(ddp, "model.safetensors", {.epoch = epoch})`.
/// **Ranks** all, with the same path. **Host** blocks until the file is written.
template <class Wrapper>
void save(Wrapper& wrapped, const std::string& path, const SaveOptions& options = {}) {
  Saver saver;
  saver.save(wrapped, path, options);
  saver.finish(wrapped);
}

}  // namespace lockstep
