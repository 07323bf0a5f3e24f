// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Checkpoints`: a folder in which a job saves its state now and then, and goes on from the
/// newest one that is whole.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/checkpoint/job.hpp"
#include "lockstep/checkpoint/options.hpp"
#include "lockstep/checkpoint/reader.hpp"
#include "lockstep/checkpoint/stop_request.hpp"
#include "lockstep/checkpoint/writer.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/utility.hpp"
#include "lockstep/observe/scores.hpp"

namespace lockstep::detail {

class CheckpointFolder;
template <class Job>
class JobCheckpoints;
struct JobSaves;

/// How many epochs of a resumed job have begun.
inline std::uint64_t begun_epochs(const Resumed& resumed) {
  return resumed.epoch + (resumed.position ? 1 : 0);
}

/// `Checkpoints` without the types of jobs: when a job saves, and where.
class CheckpointPlan {
 public:
  explicit CheckpointPlan(CheckpointOptions options);
  CheckpointPlan(const CheckpointPlan&) = delete;
  CheckpointPlan& operator=(const CheckpointPlan&) = delete;

  const CheckpointOptions& options() const { return options_; }
  /// The newest checkpoint in the folder, as this rank sees it.
  std::optional<std::string> latest() const;
  /// The best score so far, of those named `best_by`.
  std::optional<double> best() const { return best_; }
  /// The checkpoint with that score, as this rank sees it; `finish` waits for what is being
  /// written.
  std::optional<std::string> best_path() const;

  // The others: **Ranks** all. **Host** blocks.

  /// Rank 0 takes the folder; all ranks learn the best score in it.
  void open(const JointRanks& ranks);

  /// Is the job to go on from a checkpoint: because it was asked to, or was started again?
  bool will_resume() const;
  /// The checkpoint that it is to go on from: the newest valid one. Rank 0 says which it has passed
  /// over, or that there is none. Throws where there are some and all of them are damaged.
  std::optional<std::string> find_newest(const JointRanks& ranks);
  /// The job goes on from there, or with nothing begins anew. Throws where the folder holds later
  /// checkpoints.
  void begin_after(const StatefulJob& job, const Resumed* resumed);

  /// Has `save_if_due` something to do after so many updates? Steps come here: it compares
  /// counters, and asks whether a save has failed.
  bool may_be_due(std::uint64_t updates) {
    return !has_begun_ || writer_.has_failed() || is_due(updates);
  }
  /// Now and then ranks tell each other whether their time is over or a signal has come. `make()`
  /// is called where something is saved.
  void save_if_due(const StatefulJob& job, FunctionRef<SaveOptions()> make);
  void save_epoch(const StatefulJob& job, SaveOptions options, bool is_last);
  std::string save_now(const StatefulJob& job, SaveOptions options);
  void finish_with(const JointRanks& ranks) { writer_.finish_with(ranks); }

 private:
  using Clock = std::chrono::steady_clock;

  /// What a rank tells the others now and then.
  struct RanksLook {
    std::int32_t signal = 0;
    std::uint32_t is_due = 0;
    std::uint64_t updates_per_look = 1;
  };

  bool is_due(std::uint64_t updates) {
    if (updates == updates_) return false;
    if (until_look_ <= 1 || is_due_by_count(updates)) return true;
    --until_look_;
    updates_ = updates;
    return false;
  }
  bool is_due_by_count(std::uint64_t updates) const {
    const std::uint64_t every = options_.every_steps;
    return every != 0 && updates / every != updates_ / every;
  }
  void begin(const StatefulJob& job);
  bool look(const JointRanks& ranks);
  RanksLook own_look(std::size_t world);
  std::string told_best() const;
  void learn_best(const std::string& told);
  std::optional<double> score_in(const Scores& scores) const;
  bool is_better(double score) const;
  std::string save_as(const StatefulJob& job, SaveOptions options, std::optional<double> score,
                      bool asynchronous);
  void save_or_stop(const StatefulJob& job, SaveOptions options, std::optional<double> score);

  CheckpointOptions options_;
  std::shared_ptr<CheckpointFolder> folder_;  // of rank 0
  StopRequest stop_request_;
  StateWriter writer_;
  std::optional<double> best_;
  std::uint64_t updates_ = 0;  // when this was last asked
  std::uint64_t until_look_ = 1;
  std::uint64_t updates_per_look_ = 1;
  int signal_ = 0;
  bool has_begun_ = false;
  Clock::time_point looked_ = Clock::now();
  Clock::time_point saved_ = looked_;
};

/// The checkpoint that `where` names: the file, or the newest valid one in the folder. **Ranks**
/// all. **Host** blocks.
std::string checkpoint_at(const JointRanks& ranks, const std::string& where);

/// Has a trainer written this file, and said how far its loops were? **Ranks** all. **Host**
/// blocks.
bool has_course(const JointRanks& ranks, const std::string& path);

}  // namespace lockstep::detail

namespace lockstep {

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
class Checkpoints : private detail::CheckpointPlan {
 public:
  /// Takes the folder, which is made where there is none, for this job alone. While this object
  /// lives, SIGTERM and SIGUSR1 ask the job to stop. **Ranks** all. **Host** blocks.
  template <class Wrapper>
  Checkpoints(Wrapper& wrapped, CheckpointOptions options) : CheckpointPlan(std::move(options)) {
    with_job(wrapped, [&](const Job& job) { open(job.ranks); });
  }

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
    if (may_be_due(wrapped.updates())) [[unlikely]]
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
    with_job(wrapped, [&](const Job& job) { finish_with(job.ranks); });
  }

  using CheckpointPlan::best;
  using CheckpointPlan::best_path;
  using CheckpointPlan::latest;
  using CheckpointPlan::options;

 private:
  template <class>
  friend class detail::JobCheckpoints;
  friend struct detail::JobSaves;
  using Job = detail::StatefulJob;

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
};

}  // namespace lockstep
