// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Checkpoints`: a folder in which a job saves its state now and then, and goes on from the
/// newest one that is whole.

#include <atomic>
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
  /// After how many updates `save_if_due` has something to do.
  std::uint64_t next_due() const;

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
