// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `save`, `load`, `resume`, `Saver` and `Checkpoints`: a wrapped model and its optimizer in
/// files, at once or while training goes on.
///
/// A file may have been written by a job of another world, strategy, backend, device, sharding or
/// precision: tensors are found by their names, and a rank reads what it keeps and nothing else.
/// Before anything of the job changes, rank 0 has compared all checksums, and all ranks have
/// compared names, shapes and types. What goes wrong on one rank is the same error on all.

#include <chrono>
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
#include "lockstep/comm/call.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/utility.hpp"
#include "lockstep/observe/scores.hpp"

namespace lockstep::detail {

class CheckpointFolder;

/// How many epochs of a resumed job have begun.
inline std::uint64_t begun_epochs(const Resumed& resumed) {
  return resumed.epoch + (resumed.position ? 1 : 0);
}

/// What is to be done after an update; all ranks want the same.
enum class WantedSave : std::uint8_t { none, save, stop };

/// When a job saves and where, whatever its type is.
class CheckpointPlan {
 public:
  explicit CheckpointPlan(CheckpointOptions options);

  const CheckpointOptions& options() const { return options_; }
  /// The file of a checkpoint after so many updates.
  std::string path_of(std::uint64_t updates) const;

  /// Rank 0 takes the folder; all ranks learn the best score in it. **Ranks** all. **Host** blocks.
  void open(const JointRanks& ranks);

  /// Is the job to go on from a checkpoint: because it was asked to, or was started again?
  bool resumes() const;
  /// The newest valid checkpoint in the folder. Rank 0 says which it has passed over, or that there
  /// is none. Throws where there are checkpoints and all of them are damaged. **Ranks** all.
  /// **Host** blocks.
  std::optional<std::string> find_newest(const JointRanks& ranks);
  /// The job goes on from there, or with nothing begins anew. Throws where the folder holds later
  /// checkpoints. **Ranks** all. **Host** blocks.
  void begin(const JointRanks& ranks, std::uint64_t updates, const Resumed* resumed);

  /// May something be due after so many updates? Steps come here: it compares counters.
  bool may_be_due(std::uint64_t updates) {
    if (updates == updates_) return false;
    const std::uint64_t every = options_.every_steps;
    if (until_look_ <= 1 || (every != 0 && updates / every != updates_ / every)) return true;
    --until_look_;
    updates_ = updates;
    return false;
  }
  /// What is due then, where something may be. Now and then ranks tell each other whether their
  /// time is over or a signal has come. **Ranks** all. **Host** blocks now and then.
  WantedSave after_update(const JointRanks& ranks, std::uint64_t updates);
  /// What is due when an epoch has ended. **Ranks** all. **Host** blocks.
  WantedSave after_epoch(const JointRanks& ranks, bool is_best, bool is_last);

  /// The score that the best checkpoint is chosen by; throws where the scores have none.
  std::optional<double> score_in(const Scores& scores) const;
  /// Is it better than the best so far? NaN never is.
  bool is_better(double score) const;
  std::optional<double> best() const { return best_; }

  /// The newest checkpoint in the folder, and the best one, as this rank sees it.
  std::optional<std::string> latest() const;
  std::optional<std::string> best_path() const;

  /// Looks whether the folder is still there, and fills in what the plan says of a save. A score
  /// makes it the best. **Ranks** all. **Host** blocks.
  void prepare(const JointRanks& ranks, std::uint64_t updates, std::optional<double> score,
               SaveOptions& options);
  /// The signal that asks the job to stop; the state is saved.
  int stop();

 private:
  using Clock = std::chrono::steady_clock;

  /// What a rank tells the others now and then.
  struct RanksLook {
    std::int32_t signal = 0;
    std::uint32_t is_due = 0;
    std::uint64_t updates_per_look = 1;
  };

  bool look(const JointRanks& ranks);
  RanksLook own_look(std::size_t world);
  static void add_look(RanksLook& all, const std::string& told);
  bool take_look(const RanksLook& all);
  std::string told_best() const;
  void learn_best(const std::string& told);

  CheckpointOptions options_;
  std::shared_ptr<CheckpointFolder> folder_;  // of rank 0
  StopRequest stop_request_;
  std::optional<double> best_;
  std::uint64_t updates_ = 0;  // when this was last asked
  std::uint64_t until_look_ = 1;
  std::uint64_t updates_per_look_ = 1;
  int signal_ = 0;
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

/// Writes checkpoints of one job, one after the other; its memory and thread serve all of them. It
/// must not outlive the wrapper.
///
///     Saver saver;
///     for (const auto& batch : loader) {
///       ddp.step(batch);
///       if (ddp.updates() % 1000 == 0) saver.save(ddp, path, {.asynchronous = true});
///     }
///     saver.finish(ddp);
class Saver {
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
    if constexpr (requires { Wrapper::is_rejected; }) {
      return false;
    } else {
      bool is_saved = false;
      detail::with_job(wrapped, detail::JobCall::save, [&](const detail::StatefulJob& job) {
        is_saved = core_.save(job, path, options);
      });
      return is_saved;
    }
  }

  /// Waits until all is written. **Ranks** all. **Host** blocks.
  template <class Wrapper>
  void finish(Wrapper& wrapped) {
    if constexpr (!requires { Wrapper::is_rejected; }) {
      detail::with_joint_ranks(wrapped, detail::JobCall::save,
                               [&](const detail::JointRanks& ranks) { core_.finish(ranks); });
    }
  }

  /// Throws the failure of an asynchronous save of this rank that has ended.
  void rethrow() { core_.rethrow(); }
  bool has_failed() const { return core_.has_failed(); }
  /// Is this rank's part of a save still being written?
  bool is_busy() const { return core_.is_busy(); }

 private:
  detail::SaverCore core_;
};

/// Saves a wrapped model with its optimizer: `save(ddp, "model.safetensors", {.epoch = epoch})`.
/// **Ranks** all, with the same path. **Host** blocks until the file is written.
template <class Wrapper>
void save(Wrapper& wrapped, const std::string& path, const SaveOptions& options = {}) {
  Saver saver;
  saver.save(wrapped, path, options);
  saver.finish(wrapped);
}

namespace detail {

template <class Wrapper>
Resumed load_wrapped(Wrapper& wrapped, const std::string& path, const LoadOptions& options,
                     LoadWhat what) {
  if constexpr (requires { Wrapper::is_rejected; }) {
    return {};
  } else {
    Resumed resumed;
    with_job(wrapped, JobCall::load,
             [&](const StatefulJob& job) { resumed = load_job(job, path, options, what); });
    return resumed;
  }
}

}  // namespace detail

/// Loads parameters, buffers and the optimizer: its states, its numbers, its counts of updates, its
/// schedule and the loss scale. Gradients that were added up in the job are forgotten. **Ranks**
/// all, with the same path. **Host** blocks.
template <class Wrapper>
LoadReport load(Wrapper& wrapped, const std::string& path, const LoadOptions& options = {}) {
  return detail::load_wrapped(wrapped, path, options, detail::LoadWhat::training).report;
}

/// Loads parameters and buffers, from any safetensors file: `load_parameters(ddp,
/// "resnet.safetensors", {.rename = ...})`. The optimizer stays as it is. **Ranks** all, with the
/// same path. **Host** blocks.
template <class Wrapper>
LoadReport load_parameters(Wrapper& wrapped, const std::string& path,
                           const LoadOptions& options = {}) {
  return detail::load_wrapped(wrapped, path, options, detail::LoadWhat::parameters).report;
}

/// Loads all that `load` does, and goes on where the job was saved, with the program's values. The
/// result says where, for `loader.resume` and the loop. **Ranks** all, with the same path. **Host**
/// blocks.
template <class Wrapper>
Resumed resume(Wrapper& wrapped, const std::string& path, const LoadOptions& options = {}) {
  return detail::load_wrapped(wrapped, path, options, detail::LoadWhat::job);
}

namespace detail {

template <class Job>
class JobCheckpoints;
struct JobSaves;

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
  Checkpoints(Wrapper& wrapped, CheckpointOptions options) : plan_(std::move(options)) {
    with_ranks(wrapped, [&](const detail::JointRanks& ranks) { plan_.open(ranks); });
  }
  Checkpoints(const Checkpoints&) = delete;
  Checkpoints& operator=(const Checkpoints&) = delete;

  const CheckpointOptions& options() const { return plan_.options(); }

  /// Goes on from the newest valid checkpoint in the folder, if `.resume` says so or the job was
  /// started again by its launcher. Nothing where there is none: training starts anew. Rank 0 says
  /// which it is. An error where there are some, and all are damaged: nothing is deleted. **Ranks**
  /// all. **Host** blocks.
  template <class Wrapper>
  std::optional<Resumed> resume(Wrapper& wrapped, const LoadOptions& options = {}) {
    std::optional<Resumed> resumed;
    if (const auto path = find_newest(wrapped)) resumed = lockstep::resume(wrapped, *path, options);
    begin_after(wrapped, resumed ? &*resumed : nullptr);
    return resumed;
  }

  /// To be called after every step, with `SaveOptions` or a function that returns them, which is
  /// called when they are needed. Saves where it is time to; after a request to stop it saves and
  /// throws `Stopped`. An asynchronous save that has failed is thrown here. Nothing is saved
  /// between the micro-batches of a step. **Ranks** all. **Host** blocks for a copy of what is
  /// saved.
  template <class Wrapper, class Options>
  void step(Wrapper& wrapped, const Options& options) {
    rethrow(wrapped);
    begin(wrapped);
    if (plan_.may_be_due(wrapped.updates())) carry_out(wrapped, options);
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
    rethrow(wrapped);
    begin(wrapped);
    SaveOptions saved = made(options);
    const std::optional<double> score = plan_.score_in(saved.scores);
    const bool is_best = score && plan_.is_better(*score);
    auto wanted = detail::WantedSave::none;
    with_ranks(wrapped, [&](const detail::JointRanks& ranks) {
      wanted = plan_.after_epoch(ranks, is_best, is_last);
    });
    save_as_wanted(wanted, wrapped, saved, is_best ? score : std::nullopt);
  }

  /// Saves now, and returns the file. **Ranks** all. **Host** as `step`.
  template <class Wrapper>
  std::string save(Wrapper& wrapped, SaveOptions options = {}) {
    rethrow(wrapped);
    begin(wrapped);
    return save_as(wrapped, std::move(options), std::nullopt, plan_.options().asynchronous);
  }

  /// Waits until all is written. **Ranks** all. **Host** blocks.
  template <class Wrapper>
  void finish(Wrapper& wrapped) {
    saver_.finish(wrapped);
  }

  /// The newest checkpoint in the folder, as this rank sees it.
  std::optional<std::string> latest() const { return plan_.latest(); }
  /// The best score so far, of those named `best_by`.
  std::optional<double> best() const { return plan_.best(); }
  /// The checkpoint with that score, as this rank sees it; `finish` waits for what is being
  /// written.
  std::optional<std::string> best_path() const { return plan_.best_path(); }

 private:
  template <class>
  friend class detail::JobCheckpoints;
  friend struct detail::JobSaves;

  template <class Wrapper>
  static void with_ranks(Wrapper& wrapped, detail::FunctionRef<void(const detail::JointRanks&)> f) {
    detail::with_joint_ranks(wrapped, detail::JobCall::save, f);
  }

  /// The checkpoint that the job is to go on from, if there is one. `begin_after` comes next.
  template <class Wrapper>
  std::optional<std::string> find_newest(Wrapper& wrapped) {
    std::optional<std::string> path;
    if (!plan_.resumes()) return path;
    with_ranks(wrapped, [&](const detail::JointRanks& ranks) { path = plan_.find_newest(ranks); });
    return path;
  }
  bool will_resume() const { return plan_.resumes(); }
  /// Has `step` something to do? It compares counters, and asks whether a save has failed.
  bool may_be_due(std::uint64_t updates) {
    return !has_begun_ || saver_.has_failed() || plan_.may_be_due(updates);
  }
  template <class Wrapper>
  [[gnu::cold, gnu::noinline]] void begin_after(Wrapper& wrapped, const Resumed* resumed) {
    has_begun_ = true;
    with_ranks(wrapped, [&](const detail::JointRanks& ranks) {
      plan_.begin(ranks, wrapped.updates(), resumed);
    });
  }

  template <class Options>
  static SaveOptions made(const Options& options) {
    if constexpr (std::invocable<const Options&>) {
      return options();
    } else {
      return options;
    }
  }

  /// The other ranks do not know of this rank's failure: they are told.
  template <class Wrapper>
  void rethrow(Wrapper& wrapped) {
    if constexpr (Wrapper::is_one_process) {
      saver_.rethrow();
    } else {
      try {
        saver_.rethrow();
      } catch (const Error& error) {
        const Error named = error.rank() ? error : error.on(detail::process_rank(wrapped));
        wrapped.communicator().abandon(named.what());
        throw named;
      }
    }
  }

  template <class Wrapper>
  void begin(Wrapper& wrapped) {
    if (!has_begun_) begin_after(wrapped, nullptr);
  }

  template <class Wrapper, class Options>
  [[gnu::cold, gnu::noinline]] void carry_out(Wrapper& wrapped, const Options& options) {
    auto wanted = detail::WantedSave::none;
    with_ranks(wrapped, [&](const detail::JointRanks& ranks) {
      wanted = plan_.after_update(ranks, wrapped.updates());
    });
    save_as_wanted(wanted, wrapped, options, std::nullopt);
  }
  template <class Wrapper, class Options>
  void save_as_wanted(detail::WantedSave wanted, Wrapper& wrapped, const Options& options,
                      std::optional<double> score) {
    if (wanted == detail::WantedSave::none) return;
    const bool stops = wanted == detail::WantedSave::stop;
    const std::string path =
        save_as(wrapped, made(options), score, plan_.options().asynchronous && !stops);
    if (stops) throw Stopped(plan_.stop(), path);
  }

  template <class Wrapper>
  std::string save_as(Wrapper& wrapped, SaveOptions options, std::optional<double> score,
                      bool asynchronous) {
    options.asynchronous = asynchronous;
    with_ranks(wrapped, [&](const detail::JointRanks& ranks) {
      plan_.prepare(ranks, wrapped.updates(), score, options);
    });
    std::string path = plan_.path_of(wrapped.updates());
    saver_.save(wrapped, path, options);
    return path;
  }

  detail::CheckpointPlan plan_;
  Saver saver_;
  bool has_begun_ = false;
};

}  // namespace lockstep
