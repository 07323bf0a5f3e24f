// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Checkpoints`: a folder in which a job saves its state now and then, and goes on from the
/// newest one that is whole.

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/checkpoint/options.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/utility.hpp"
#include "lockstep/observe/scores.hpp"
#include "lockstep/strategy/phases.hpp"
#include "lockstep/trainer/checkpoint_calls.hpp"
#include "lockstep/trainer/checkpoint_plan.hpp"
#include "lockstep/trainer/joint_work.hpp"
#include "lockstep/trainer/loading.hpp"
#include "lockstep/trainer/saving.hpp"
#include "lockstep/trainer/with_kept_job.hpp"

namespace lockstep {

namespace detail {

template <class Job>
class JobCheckpoints;

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
    if (wrapped.updates() == updates_) return;
    updates_ = wrapped.updates();
    if constexpr (!detail::WrapperParts<Wrapper>::is_one_process)
      wrapped.require_joined("checkpoints");
    const detail::WantedSave wanted =
        plan_.after_update(updates_, detail::process_count(wrapped), [&](std::string text) {
          return detail::gather_texts(wrapped, detail::JobCall::save, std::move(text));
        });
    if (wanted == detail::WantedSave::none) return;
    carry_out(wanted, wrapped, options, std::nullopt);
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
    if (wanted == detail::WantedSave::none) return;
    carry_out(wanted, wrapped, saved, is_best ? score : std::nullopt);
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
  template <class Wrapper>
  [[gnu::cold, gnu::noinline]] void begin_after(Wrapper& wrapped, const Resumed* resumed) {
    has_begun_ = true;
    updates_ = wrapped.updates();
    with_ranks(wrapped,
               [&](const detail::JointRanks& ranks) { plan_.begin(ranks, updates_, resumed); });
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
    if constexpr (detail::WrapperParts<Wrapper>::is_one_process) {
      saver_.rethrow();
    } else {
      detail::tell_others_of<false>(wrapped.communicator(), [&] { saver_.rethrow(); });
    }
  }

  template <class Wrapper>
  void begin(Wrapper& wrapped) {
    if (!has_begun_) begin_after(wrapped, nullptr);
  }

  template <class Wrapper, class Options>
  [[gnu::cold, gnu::noinline]] void carry_out(detail::WantedSave wanted, Wrapper& wrapped,
                                              const Options& options, std::optional<double> score) {
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
  std::uint64_t updates_ = 0;
  bool has_begun_ = false;
};

}  // namespace lockstep
