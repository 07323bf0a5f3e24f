// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Saving and resuming of a trainer, for programs with checkpoints only.

#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/trainer/progress.hpp"

namespace lockstep::detail {

struct JobSaves : SaveDue {
  StateValues kept;
  TrainingProgress progress;                                 // of the latest save
  Saver saver{&at_once};                                     // of `save`
  std::vector<std::pair<std::string, SaveOptions>> waiting;  // for the end of an accumulated step
  std::unique_ptr<Checkpoints> checkpoints;
  bool is_watching = false;  // steps may have to save
};

/// References to all members, by their names in a checkpoint.
inline StateValues progress_values(TrainingProgress& progress) {
  return {{"lockstep/run", progress.run},
          {"lockstep/epoch", progress.epoch},
          {"lockstep/loop", progress.loop},
          {"lockstep/loop_is_over", progress.loop_is_over},
          {"lockstep/is_closed", progress.is_closed},
          {"lockstep/shown_epoch", progress.metrics.epoch},
          {"lockstep/shown_epochs", progress.metrics.epochs},
          {"lockstep/steps", progress.metrics.steps},
          {"lockstep/samples", progress.metrics.samples},
          {"lockstep/seconds", progress.metrics.seconds},
          {"lockstep/loss", progress.loss},
          {"lockstep/losses", progress.losses},
          {"lockstep/score_names", progress.score_names},
          {"lockstep/score_means", progress.score_means},
          {"lockstep/score_counts", progress.score_counts},
          {"lockstep/skipped", progress.skipped},
          {"lockstep/run_steps", progress.run_steps},
          {"lockstep/epoch_updates", progress.epoch_updates}};
}

template <class Job>
struct JobSaving {
  Job& job;

  JobSaves& saves() {
    static_cast<void>(&is_mentioned);  // instantiates its initializer
    if (!job.saves_) job.saves_ = std::make_shared<JobSaves>();
    return static_cast<JobSaves&>(*job.saves_);
  }

  static void run(Job& job, SaveMoment moment) {
    JobSaving self{job};
    switch (moment) {
      case SaveMoment::first_epochs:
        self.resume_from_folder();
        break;
      case SaveMoment::first_step:
        self.open_checkpoints();
        if (self.saves().checkpoints && self.saves().checkpoints->will_resume())
          fail("step", {"the job is to go on from a checkpoint, and has begun without one"},
               "call job.resume() or job.epochs() before the first step", job.rank());
        break;
      case SaveMoment::due:
        self.save_what_is_due();
        break;
      case SaveMoment::finish:
        self.finish_all();
        break;
      default:
        self.save_at_end_of_epoch(moment == SaveMoment::end_of_last_epoch);
    }
  }

  void keep(std::string_view name, auto& value) {
    if (name.starts_with("lockstep/"))
      fail("keep", {"names that begin with lockstep/ are lockstep's own"},
           "give the value another name", job.rank());
    saves().kept.add(name, value);
  }

  void save(const std::string& path, SaveOptions options) {
    [[maybe_unused]] const auto on = job.enter("save");
    const bool waits = job.wrapped_.micro_batches() != 0 && !options.parameters_only;
    if (options.asynchronous || waits) watch_steps();
    if (waits) {
      saves().is_waiting = true;
      saves().waiting.emplace_back(path, std::move(options));
      return;
    }
    with_job(job.wrapped_, JobCall::save, [&](const StatefulJob& state) {
      saves().saver.save(state, path, save_options(std::move(options)));
    });
  }

  LoadReport load(const std::string& path, const LoadOptions& options) {
    [[maybe_unused]] const auto on = job.enter("load");
    const bool owns_schedule = job.progress_.owns_schedule(job.wrapped_);
    LoadReport report = lockstep::load(job.wrapped_, path, options);
    if (owns_schedule) job.progress_.adopt_schedule(job.wrapped_);
    return report;
  }

  LoadReport load_parameters(const std::string& path, const LoadOptions& options) {
    [[maybe_unused]] const auto on = job.enter("load_parameters");
    return lockstep::load_parameters(job.wrapped_, path, options);
  }

  Resumed resume(const std::string& where, const LoadOptions& options) {
    [[maybe_unused]] const auto on = job.enter("resume");
    job.has_begun_ = true;
    Resumed resumed;
    with_job(job.wrapped_, JobCall::load, [&](const StatefulJob& state) {
      resumed = resume_from(state, checkpoint_at(state.ranks, where), options);
      if (saves().checkpoints) saves().checkpoints->begin_after(state, &resumed);
    });
    saves().wait = 0;
    return resumed;
  }

  std::optional<Resumed> resume() {
    [[maybe_unused]] const auto on = job.enter("resume");
    if (!std::exchange(job.has_begun_, true)) return resume_from_folder();
    open_checkpoints();
    return std::nullopt;
  }

  void checkpoints(const CheckpointOptions& options) {
    [[maybe_unused]] const auto on = job.enter("checkpoints");
    saves().checkpoints.reset();
    // `make_unique` cannot call the private constructor.
    saves().checkpoints.reset(
        new Checkpoints(job.options_.checkpoint.over(options), &saves().at_once));
    with_job(job.wrapped_, JobCall::save,
             [&](const StatefulJob& state) { saves().checkpoints->open(state.ranks); });
    watch_steps();
  }

  Checkpoints* checkpoints() {
    open_checkpoints();
    return saves().checkpoints.get();
  }

  void save_what_is_due() {
    const auto make = [&] { return save_options({}); };
    const auto save = [&](const StatefulJob& state) {
      JobSaves& all = saves();
      all.at_once = false;
      all.saver.rethrow(state);
      if (state.micro_batches == 0) save_waiting(state);
      if (all.checkpoints) all.checkpoints->save_if_due(state, make);
      all.since = state.updates;
      all.wait = all.checkpoints ? all.checkpoints->updates_to_go() : SaveDue::never;
    };
    if constexpr (Job::joins) {
      const auto suspended = job.wrapped_.suspend_join();
      with_job(job.wrapped_, JobCall::save, save);
    } else {
      with_job(job.wrapped_, JobCall::save, save);
    }
  }

  /// Saves that were requested between the micro-batches of a step, now that the step is over.
  void save_waiting(const StatefulJob& state) {
    saves().is_waiting = false;
    for (auto& [path, options] : std::exchange(saves().waiting, {}))
      saves().saver.save(state, path, save_options(std::move(options)));
  }

  void save_at_end_of_epoch(bool is_last) {
    if (!saves().checkpoints) return;
    [[maybe_unused]] const auto on = job.enter("epochs");
    saves().wait = 0;
    const auto make = [&] { return save_options({}); };
    saves().checkpoints->end_epoch(job.wrapped_, make, is_last);
  }

  void finish_all() {
    if (!saves().is_watching) return;
    // No update will come: micro-batches that none has used are dropped.
    if (!saves().waiting.empty()) job.wrapped_.drop_tail();
    with_job(job.wrapped_, JobCall::save, [&](const StatefulJob& state) {
      save_waiting(state);
      saves().saver.finish(state);
      if (saves().checkpoints) saves().checkpoints->finish(state);
    });
  }

  void watch_steps() {
    saves().is_watching = true;
    saves().wait = 0;
    job.progress_.display.look_at_every_step();
  }

  /// The folder of the command line, unless the program has opened it.
  void open_checkpoints() {
    if (!saves().checkpoints && job.options_.checkpoint.any()) checkpoints(CheckpointOptions{});
  }

  /// Resumes from the job's own folder, after `--resume` or a restart.
  std::optional<Resumed> resume_from_folder() {
    open_checkpoints();
    std::optional<Resumed> resumed;
    if (!saves().checkpoints) return resumed;
    saves().wait = 0;
    with_job(job.wrapped_, JobCall::load, [&](const StatefulJob& state) {
      if (const auto path = saves().checkpoints->find_newest(state.ranks))
        resumed = resume_from(state, *path, {});
      saves().checkpoints->begin_after(state, resumed ? &*resumed : nullptr);
    });
    return resumed;
  }

  /// Adds what the trainer knows.
  SaveOptions save_options(SaveOptions options) {
    const InJobCall in(JobCall::save);
    saves().progress = job.training_progress();
    options.epoch = job.progress_.now().epoch;
    options.position = job.data_position();
    if (options.scores.empty()) options.scores = job.summary().scores;
    if (!options.best && saves().checkpoints) options.best = saves().checkpoints->best();
    for (const StateValue& value : saves().kept) options.values.add(value);
    for (const StateValue& value : progress_values(saves().progress)) options.common.add(value);
    return options;
  }

  Resumed resume_from(const StatefulJob& state, const std::string& path, LoadOptions options) {
    TrainingProgress progress;
    constexpr std::uint64_t unknown = ~std::uint64_t{0};
    progress.run = unknown;
    for (const StateValue& value : saves().kept) options.values.add(value);
    for (const StateValue& value : progress_values(progress)) options.common.add(value);
    Resumed resumed = load_job(state, path, options, LoadWhat::job);
    if (progress.run == unknown) {  // saved by a hand-written loop
      progress.run = 1;
      progress.epoch = resumed.epoch;
      progress.loop = resumed.position ? 1 : 0;
    }
    if (progress.metrics.samples != 0) progress.metrics.loss = progress.loss;
    progress.position = resumed.position;
    job.progress_.go_on(progress);
    if (job.progress_.log) {
      JsonLine line;
      line.add("from", resumed.path).add("epoch", begun_epochs(resumed)).add("step", resumed.step);
      job.progress_.log.write(JsonLine().add("resumed", line.add("world", resumed.world.value())));
    }
    return resumed;
  }

  static inline const bool is_mentioned = (checkpoint_hook<Job> = &run, true);
};

}  // namespace lockstep::detail
