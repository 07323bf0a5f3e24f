// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `save` and `Saver`: every rank writes its own file, together or beside training, and rank
/// 0 commits them. `Checkpoints`: a folder in which a job saves its state now and then and when it
/// is asked to stop, and goes on from the newest one that is whole.

#include <atomic>
#include <exception>

#include "lockstep/checkpoint/job.hpp"
#include "lockstep/checkpoint/options.hpp"
#include "lockstep/checkpoint/reader.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/core/utility.hpp"
#include "lockstep/observe/scores.hpp"

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
  ~BackgroundWriter() {
    thread_.join();
    if (const std::exception_ptr thrown = take_failure()) tell_late_failure({thrown, rank_});
  }
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  bool is_busy() const { return is_busy_.load(std::memory_order_acquire); }

  /// Throws the failure of work that has ended, once. A job calls it at every step.
  void rethrow() {
    if (const std::exception_ptr thrown = take_failure()) std::rethrow_exception(thrown);
  }

  /// **Host** blocks until the work under way is done, and throws its failure.
  void wait() {
    thread_.join();
    rethrow();
  }

  /// The failure of work that has ended, or null. It is not thrown any more.
  std::exception_ptr take_failure() {
    if (!has_failed_.load(std::memory_order_acquire)) return nullptr;
    thread_.join();  // it is on its way out, and must not hold the failure any more
    has_failed_.store(false, std::memory_order_relaxed);
    return std::exchange(failure_, nullptr);
  }

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
          [this](std::exception_ptr thrown) {
            failure_ = std::move(thrown);
            has_failed_.store(true, std::memory_order_release);
            if (alarm_ != nullptr) alarm_->store(true, std::memory_order_release);
            is_busy_.store(false, std::memory_order_release);
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
  std::shared_ptr<std::byte> snapshot_;
  std::size_t snapshot_bytes_ = 0;
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

namespace lockstep::detail {

/// While one exists, SIGTERM and SIGUSR1 do not end the process: the first of them is remembered.
/// All objects of a process, of ranks that are threads too, share what is remembered, and the
/// handlers. A signal that was ignored stays ignored; a handler that the program had is called as
/// well. A process that is forked meanwhile is not asked to stop: there a signal does what it did
/// before.
///
/// From the first signal on the process has LOCKSTEP_GRACE_SECONDS, 60 if that is not set, to call
/// `finished`. Otherwise it says so and ends with status 128 + the signal.
///
/// When the last object goes and nobody has asked, the handlers are put back. After a request, and
/// after `finished`, they stay: launchers often send a signal twice, and a rank that stops because
/// another was asked gets its own signal later. Neither must end a process that has saved its state
/// and is on its way out. `forget` is for programs that go on.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  /// The signal that has asked, or 0.
  int signal() const;
  bool is_made() const { return signal() != 0; }

  /// The step has ended and the state is saved: there is no time limit any more.
  void finished();

  /// Takes the request back and, where no object is left, puts the handlers back.
  static void forget();
};

}  // namespace lockstep::detail

namespace lockstep {

namespace detail {

class CheckpointFolder;
template <class Job>
struct JobSaving;

/// How many epochs of a resumed job have begun.
inline std::uint64_t begun_epochs(const Resumed& resumed) {
  return resumed.epoch + (resumed.position ? 1 : 0);
}

/// The checkpoint that `where` names: the file, or the newest valid one in the folder. **Ranks**
/// all. **Host** blocks.
std::string checkpoint_at(const JointRanks& ranks, const std::string& where);

}  // namespace detail

/// A folder of checkpoints, for hand-written loops; a trainer has one by itself (`--checkpoint`,
/// `job.checkpoints(options)`). It must not outlive the wrapper.
///
///     Checkpoints checkpoints(ddp, {.folder = "run", .every_steps = 1000, .resume = true});
///     const auto from = checkpoints.resume(ddp);
///     if (from && from->position) loader.resume(*from->position);
///     for (std::uint64_t epoch = from ? from->epoch : 0; epoch < 10; ++epoch) {
///       sampler.set_epoch(Epoch{epoch});
///       for (const auto& batch : loader) {
///         ddp.step(batch);
///         checkpoints.step(ddp, [&] { return SaveOptions{.epoch = epoch, .position =
///         loader.state()}; });
///       }
///       checkpoints.end_epoch(ddp, {.epoch = epoch + 1, .scores = scores});
///     }
///     checkpoints.finish(ddp);
class Checkpoints {
 public:
  /// Takes the folder, which is made where there is none, for this job alone. While this object
  /// lives, SIGTERM and SIGUSR1 ask the job to stop. **Ranks** all. **Host** blocks.
  template <class Wrapper>
  Checkpoints(Wrapper& wrapped, CheckpointOptions options) : Checkpoints(std::move(options)) {
    with_job(wrapped, [&](const Job& job) { open(job.ranks); });
  }
  Checkpoints(const Checkpoints&) = delete;
  Checkpoints& operator=(const Checkpoints&) = delete;

  /// Goes on from the newest valid checkpoint in the folder, if `.resume` says so or the job was
  /// started again by its launcher. Nothing where there is none: training starts anew. Rank 0 says
  /// which it is. An error where there are some, and all are damaged: nothing is deleted. **Ranks**
  /// all. **Host** blocks.
  template <class Wrapper>
  std::optional<Resumed> resume(Wrapper& wrapped, const LoadOptions& options = {}) {
    std::optional<Resumed> resumed;
    with_job(wrapped, [&](const Job& job) {
      if (const auto path = find_newest(job.ranks))
        resumed = load_job(job, *path, options, detail::LoadWhat::job);
      begin_after(job, resumed ? &*resumed : nullptr);
    });
    return resumed;
  }

  /// To be called after every step, with `SaveOptions` or a function that returns them, which is
  /// called when they are needed. Saves where it is time to; after a request to stop it saves and
  /// throws `Stopped`. An asynchronous save that has failed is thrown here. Nothing is saved
  /// between the micro-batches of a step. **Ranks** all. **Host** blocks for a copy of what is
  /// saved.
  template <class Wrapper, class Options>
  void step(Wrapper& wrapped, const Options& options) {
    if (due_(wrapped.updates())) [[unlikely]]
      carry_out(wrapped, options);
  }
  template <class Wrapper>
  void step(Wrapper& wrapped) {
    step(wrapped, SaveOptions{});
  }

  /// To be called at the end of every epoch, with `.epoch` as the next one and, where `best_by` is
  /// set, with the epoch's scores. Saves if no other time to save was chosen, if the score is the
  /// best so far, and after the last epoch. **Ranks** all. **Host** as `step`.
  template <class Wrapper, class Options>
  void end_epoch(Wrapper& wrapped, const Options& options, bool is_last = false) {
    with_job(wrapped, [&](const Job& job) { save_epoch(job, made(options), is_last); });
  }

  /// Saves now, and returns the file. **Ranks** all. **Host** as `step`.
  template <class Wrapper>
  std::string save(Wrapper& wrapped, SaveOptions options = {}) {
    std::string path;
    with_job(wrapped, [&](const Job& job) { path = save_now(job, std::move(options)); });
    return path;
  }

  /// Waits until all is written. **Ranks** all. **Host** blocks.
  template <class Wrapper>
  void finish(Wrapper& wrapped) {
    with_job(wrapped, [&](const Job& job) { writer_.finish_with(job.ranks); });
  }

  const CheckpointOptions& options() const { return options_; }
  /// The newest checkpoint in the folder, as this rank sees it.
  std::optional<std::string> latest() const;
  /// The best score so far, of those named `best_by`.
  std::optional<double> best() const { return best_; }
  /// The checkpoint with that score, as this rank sees it; `finish` waits for what is being
  /// written.
  std::optional<std::string> best_path() const;

 private:
  template <class>
  friend struct detail::JobSaving;
  using Job = detail::StatefulJob;
  using Clock = std::chrono::steady_clock;

  template <class Wrapper>
  static void with_job(Wrapper& wrapped, detail::FunctionRef<void(const Job&)> f) {
    detail::with_job(wrapped, detail::JobCall::save, f);
  }
  template <class Options>
  static SaveOptions made(const Options& options) {
    if constexpr (std::invocable<const Options&>) {
      return options();
    } else {
      return options;
    }
  }
  template <class Wrapper, class Options>
  [[gnu::cold, gnu::noinline]] void carry_out(Wrapper& wrapped, const Options& options) {
    const auto make = [&] { return made(options); };
    with_job(wrapped, [&](const Job& job) { save_if_due(job, make); });
  }

  // **Ranks** all. **Host** blocks.

  /// `alarm` is set when a thread has failed to write, instead of that of this object.
  explicit Checkpoints(CheckpointOptions options, std::atomic<bool>* alarm = nullptr);
  /// Rank 0 takes the folder; all ranks learn the best score in it.
  void open(const detail::JointRanks& ranks);
  /// Is the job to go on from a checkpoint: because it was asked to, or was started again?
  bool will_resume() const;
  /// The checkpoint that it is to go on from: the newest valid one. Rank 0 says which it has passed
  /// over, or that there is none. Throws where there are some and all of them are damaged.
  std::optional<std::string> find_newest(const detail::JointRanks& ranks);
  /// The job goes on from there, or with nothing begins anew. Throws where the folder holds later
  /// checkpoints.
  void begin_after(const Job& job, const Resumed* resumed);
  /// Now and then ranks tell each other whether their time is over or a signal has come. `make()`
  /// is called where something is saved.
  void save_if_due(const Job& job, detail::FunctionRef<SaveOptions()> make);
  void save_epoch(const Job& job, SaveOptions options, bool is_last);
  std::string save_now(const Job& job, SaveOptions options);
  /// After how many more updates `save_if_due` has something to do.
  std::uint64_t updates_to_go() const;

  void begin(const Job& job);
  bool look(const Job& job);
  void learn_best(const std::string& told);
  std::optional<double> better_score(const Scores& scores) const;
  std::string save_as(const Job& job, SaveOptions options, std::optional<double> score,
                      bool asynchronous);
  void save_or_stop(const Job& job, SaveOptions options, std::optional<double> score);

  CheckpointOptions options_;
  std::shared_ptr<detail::CheckpointFolder> folder_;  // of rank 0
  detail::StopRequest stop_request_;
  detail::SaveDue due_;
  detail::StateWriter writer_;
  std::optional<double> best_;
  std::uint64_t updates_ = 0;  // when something was last due
  std::uint64_t look_at_ = 0;  // after how many updates ranks look next
  std::uint64_t updates_per_look_ = 1;
  int signal_ = 0;
  bool has_begun_ = false;
  Clock::time_point looked_ = Clock::now();
  Clock::time_point saved_ = looked_;
};

}  // namespace lockstep
