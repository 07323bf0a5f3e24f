// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Saver` saves a job; `Checkpoints` is a folder that a job saves to and resumes from.

#include "lockstep/detail/checkpoint/reader.hpp"

namespace lockstep::detail {

/// Runs one task at a time on a background thread; only its owner thread calls it. A failure is
/// kept until it is thrown or taken, or reported late by the destructor (`core/error.hpp`).
class BackgroundWriter {
 public:
  explicit BackgroundWriter(Rank rank, std::atomic<bool>* alarm = nullptr)
      : rank_(rank), alarm_(alarm) {}
  /// **Host** blocks until the pending task is done.
  ~BackgroundWriter() {
    thread_.join();
    if (const std::exception_ptr thrown = take_failure()) report_late_failure(thrown, rank_);
  }
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  bool is_busy() const { return is_busy_.load(std::memory_order_acquire); }

  /// Throws the failure of a finished task, once. A job calls it at every step.
  void rethrow() {
    if (const std::exception_ptr thrown = take_failure()) std::rethrow_exception(thrown);
  }

  /// **Host** blocks until the pending task is done, and throws its failure.
  void wait() {
    thread_.join();
    rethrow();
  }

  /// Takes the failure of a finished task, or null.
  std::exception_ptr take_failure() {
    if (is_busy() || !failure_) return nullptr;
    thread_.join();  // the thread still holds the exception until it exits
    return std::exchange(failure_, nullptr);
  }

  /// Runs `work()` on a thread after the pending task; if that has failed, throws instead.
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
          [this](std::exception_ptr thrown) {
            failure_ = std::move(thrown);
            is_busy_.store(false, std::memory_order_release);
            if (alarm_ != nullptr) alarm_->store(true, std::memory_order_release);
          });
    } catch (...) {
      is_busy_.store(false, std::memory_order_relaxed);
      throw;
    }
  }

 private:
  Rank rank_;
  std::atomic<bool>* alarm_;
  std::atomic<bool> is_busy_ = false;
  std::exception_ptr failure_;  // the thread's while it is busy
  Thread thread_;
};

/// While a `StopRequest` exists, the first SIGTERM or SIGUSR1 is recorded and does not end the
/// process. All objects of a process, also of ranks that are threads, share the record and the
/// handlers. An ignored signal stays ignored, and the program's own handler is called too. A forked
/// child handles the signals as the process did before. After the first signal, the process has
/// LOCKSTEP_GRACE_SECONDS (60) to call `finished`, or it exits with status 128 + the signal.
///
/// The last destructor restores the handlers, but not after a signal or `finished`: a second signal
/// must not end an exiting process. Programs that continue call `forget`.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  /// The first signal, or 0.
  int signal() const;
  bool is_made() const { return signal() != 0; }

  /// Stops the time limit: the step is done and the state is saved.
  void finished();

  /// Clears the request and, where no object is left, restores the handlers.
  static void forget();
};

struct RankFile;
class CheckpointFolder;
template <class Job>
struct JobSaving;

inline std::uint64_t begun_epochs(const Resumed& resumed) {
  return resumed.epoch + (resumed.position ? 1 : 0);
}

void with_saved_job(auto& wrapped, FunctionRef<void(const StatefulJob&)> f) {
  with_job(wrapped, JobCall::save, f);
}

/// The file `where`, or the newest checkpoint in this folder. **Ranks** all. **Host** blocks.
std::string checkpoint_at(const JointRanks& ranks, const std::string& where);

}  // namespace lockstep::detail

namespace lockstep {

/// Writes checkpoints of one job and reuses memory and thread. Must not outlive the wrapper.
///
///     Saver saver;
///     for (const auto& batch : loader) {
///       ddp.step(batch);
///       if (ddp.updates() % 1000 == 0) saver.save(ddp, path, {.asynchronous = true});
///     }
///     saver.finish(ddp);
class Saver {
 public:
  /// `alarm` is set when the writer thread fails, for a caller that does not ask at every step.
  explicit Saver(std::atomic<bool>* alarm = nullptr) : alarm_(alarm) {}
  /// **Host** blocks until the pending save is written; in unwinding, not for other ranks' shards.
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  /// Saves parameters, buffers (synchronised first), the optimizer and what the options name. The
  /// file is replaced atomically. An asynchronous save returns once the copies are made, on a GPU
  /// once they are enqueued; a save waits for the one before it. Between the micro-batches of a
  /// step, whose gradients are not saved, throws unless `parameters_only`. An error on one rank is
  /// thrown on all, of an asynchronous save by the next call; the job may continue.
  ///
  /// **Ranks** all, with the same path. **Host** blocks, as said. **Stream** after all steps.
  void save(auto& wrapped, const std::string& path, const SaveOptions& options = {}) {
    detail::with_saved_job(wrapped, [&](const Job& job) { save_job(job, path, options); });
  }

  /// Waits until the pending save is written. **Ranks** all. **Host** blocks.
  void finish(auto& wrapped) {
    detail::with_saved_job(wrapped, [&](const Job& job) { finish_with(job.ranks); });
  }

  /// Throws the failure of this rank's asynchronous save, and aborts the other ranks with it.
  void rethrow(auto& wrapped) {
    detail::with_saved_job(wrapped, [&](const Job& job) { rethrow_on_all(job); });
  }

  /// Is this rank's part of a save still being written?
  bool is_busy() const { return writer_ && writer_->is_busy(); }

 private:
  using Job = detail::StatefulJob;

  void save_job(const Job& job, const std::string& path, const SaveOptions& options);
  void finish_with(const detail::JointRanks& ranks);
  void rethrow_on_all(const Job& job);
  void write_later(const Job& job, const std::shared_ptr<detail::RankFile>& file);
  void give_up();

  std::atomic<bool>* alarm_;
  std::optional<detail::BackgroundWriter> writer_;
  std::shared_ptr<std::byte> snapshot_;
  std::size_t snapshot_bytes_ = 0;
  std::atomic<bool> is_given_up_ = false;  // rank 0 stops waiting for shards
  detail::EndOfScope scope_;
};

/// Saves a wrapped model with its optimizer: `save(ddp, "model.safetensors", {.epoch = epoch})`.
/// **Ranks** all, with the same path. **Host** blocks until the file is written.
void save(auto& wrapped, const std::string& path, const SaveOptions& options = {}) {
  Saver saver;
  saver.save(wrapped, path, options);
  saver.finish(wrapped);
}

/// A folder of checkpoints for hand-written loops; a trainer has its own (`--checkpoint`,
/// `job.checkpoints(options)`). The object must not outlive the wrapper.
///
///     Checkpoints checkpoints(ddp, {.folder = "run", .every_steps = 1000, .resume = true});
///     const auto from = checkpoints.resume(ddp);
///     if (from && from->position) loader.resume(*from->position);
///     for (std::uint64_t epoch = from ? from->epoch : 0; epoch < 10; ++epoch) {
///       sampler.set_epoch(Epoch{epoch});
///       for (const auto& batch : loader) {
///         ddp.step(batch);
///         checkpoints.step(ddp, [&] {
///           return SaveOptions{.epoch = epoch, .position = loader.state()};
///         });
///       }
///       checkpoints.end_epoch(ddp, {.epoch = epoch + 1, .scores = scores});
///     }
///     checkpoints.finish(ddp);
class Checkpoints {
 public:
  /// Locks the folder for this job and creates it if needed. While this object lives, SIGTERM and
  /// SIGUSR1 ask the job to stop. **Ranks** all. **Host** blocks.
  Checkpoints(auto& wrapped, CheckpointOptions options) : Checkpoints(std::move(options)) {
    detail::with_saved_job(wrapped, [&](const Job& job) { open(job.ranks); });
  }
  Checkpoints(const Checkpoints&) = delete;
  Checkpoints& operator=(const Checkpoints&) = delete;

  /// Resumes from the newest valid checkpoint if `.resume` is set or the launcher has restarted the
  /// job; returns nothing, and training starts anew, where there is none. Rank 0 prints which.
  /// Throws where all checkpoints are damaged, and deletes none. **Ranks** all. **Host** blocks.
  std::optional<Resumed> resume(auto& wrapped, const LoadOptions& options = {}) {
    std::optional<Resumed> resumed;
    detail::with_saved_job(wrapped, [&](const Job& job) {
      if (const auto path = find_newest(job.ranks))
        resumed = load_job(job, *path, options, detail::LoadWhat::job);
      begin_after(job, resumed ? &*resumed : nullptr);
    });
    return resumed;
  }

  /// Called after every step with `SaveOptions`, or a function that makes them. Saves if a
  /// checkpoint is due, but not between micro-batches; after a stop signal saves and throws
  /// `Stopped`. Throws a pending save's failure. **Ranks** all. **Host** blocks for a copy.
  template <class Wrapper, class Options = SaveOptions>
  void step(Wrapper& wrapped, const Options& options = {}) {
    if (due_(wrapped.updates())) [[unlikely]]
      carry_out(wrapped, options);
  }

  /// To be called at the end of every epoch, with `.epoch` as the next one and, if `best_by` is
  /// set, with the epoch's scores. Saves if the options set no other interval, if a save is due, if
  /// the score is the best so far, and after the last epoch. **Ranks** all. **Host** as `step`.
  template <class Wrapper, class Options = SaveOptions>
  void end_epoch(Wrapper& wrapped, const Options& options, bool is_last = false) {
    detail::with_saved_job(wrapped,
                           [&](const Job& job) { save_epoch(job, made(options), is_last); });
  }

  /// Saves now and returns the path. **Ranks** all. **Host** as `step`.
  std::string save(auto& wrapped, SaveOptions options = {}) {
    std::string path;
    detail::with_saved_job(wrapped, [&](const Job& job) {
      begin(job);
      path = save_as(job, std::move(options), std::nullopt, options_.asynchronous);
    });
    return path;
  }

  /// Waits until the pending save is written. **Ranks** all. **Host** blocks.
  void finish(auto& wrapped) { saver_.finish(wrapped); }

  const CheckpointOptions& options() const { return options_; }
  /// The newest checkpoint in the folder, as this rank sees it.
  std::optional<std::string> latest() const;
  /// The best score so far, of those named `best_by`.
  std::optional<double> best() const { return best_; }
  /// The checkpoint with the best score, as this rank sees it, without a save that is pending.
  std::optional<std::string> best_path() const;

 private:
  template <class>
  friend struct detail::JobSaving;
  using Job = detail::StatefulJob;
  using Clock = std::chrono::steady_clock;

  template <class Options>
  static SaveOptions made(const Options& options) {
    if constexpr (std::invocable<const Options&>) {
      return options();
    } else {
      return options;
    }
  }
  [[gnu::cold, gnu::noinline]] void carry_out(auto& wrapped, const auto& options) {
    const auto make = [&] { return made(options); };
    detail::with_saved_job(wrapped, [&](const Job& job) { save_if_due(job, make); });
  }

  // **Ranks** all. **Host** blocks.

  /// The saver sets `alarm`, if given, instead of this object's flag when it fails.
  explicit Checkpoints(CheckpointOptions options, std::atomic<bool>* alarm = nullptr);
  /// Rank 0 locks the folder.
  void open(const detail::JointRanks& ranks);
  /// Was the job asked to resume, or restarted by its launcher?
  bool will_resume() const;
  /// The newest valid checkpoint, if the job is to resume; throws where all are damaged.
  std::optional<std::string> find_newest(const detail::JointRanks& ranks);
  /// Starts after `resumed`, or anew if null. Throws where the folder holds later checkpoints.
  void begin_after(const Job& job, const Resumed* resumed);
  /// Every few updates, ranks exchange stop signals and whether a timed save is due.
  void save_if_due(const Job& job, detail::FunctionRef<SaveOptions()> make);
  void save_epoch(const Job& job, SaveOptions options, bool is_last);
  /// The number of updates until `save_if_due` has something to do.
  std::uint64_t updates_to_go() const {
    const std::uint64_t to_look = look_at_ - updates_;
    const std::uint64_t every = options_.every_steps;
    return every == 0 ? to_look : std::min(to_look, every - updates_ % every);
  }

  void begin(const Job& job);
  bool look(const Job& job);
  /// Calls `prepare` on rank 0; all ranks then learn the best score in the folder.
  void learn_best(const detail::JointRanks& ranks, detail::FunctionRef<void()> prepare);
  std::optional<double> better_score(const Scores& scores) const;
  std::string save_as(const Job& job, SaveOptions options, std::optional<double> score,
                      bool asynchronous);
  void save_or_stop(const Job& job, SaveOptions options, std::optional<double> score);

  CheckpointOptions options_;
  std::shared_ptr<detail::CheckpointFolder> folder_;  // rank 0 only
  detail::StopRequest stop_request_;
  detail::SaveDue due_;
  Saver saver_;
  std::optional<double> best_;
  std::uint64_t updates_ = 0;  // at the last call of save_if_due
  std::uint64_t look_at_ = 0;  // the updates at which ranks exchange signals next
  std::uint64_t updates_per_look_ = 1;
  int signal_ = 0;
  bool has_begun_ = false;
  Clock::time_point looked_ = Clock::now();
  Clock::time_point saved_ = looked_;
};

}  // namespace lockstep
