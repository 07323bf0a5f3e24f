// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The checkpoints of a trainer: saved now and then or when the program says so, and gone on
/// from.

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/checkpoints.hpp"
#include "lockstep/checkpoint/options.hpp"
#include "lockstep/checkpoint/values.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/json.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/trainer/progress.hpp"

namespace lockstep::detail {

/// What a trainer saves and loads with.
struct JobSaves {
  KeptValues kept;
  CourseState course;                                        // of the latest save
  StateWriter writer;                                        // of `save`
  std::vector<std::pair<std::string, SaveOptions>> waiting;  // for the end of an accumulated step
  std::unique_ptr<Checkpoints> checkpoints;
  bool is_watching = false;  // something may be saved while steps go on

  /// Has a trainer something to do after so many updates? Only counters and flags are looked at.
  bool may_be_due(std::uint64_t updates) {
    return !waiting.empty() || writer.has_failed() ||
           (checkpoints && checkpoints->may_be_due(updates));
  }
};

/// What a trainer does for its checkpoints at certain times. A program that never mentions those of
/// a job has no such functions, and nothing of what they need is compiled for it.
struct CheckpointHook {
  void (*begin)(void* job, bool is_step);  ///< the first call of `epochs`, or the first step
  void (*save_if_due)(void* job);
  void (*end_epoch)(void* job, bool is_last);
  void (*finish)(void* job);
};

/// That of a job, or null. Whoever saves sets it, before `main`.
template <class Job>
inline const CheckpointHook* checkpoint_hook = nullptr;

/// A member of a trainer that ends before the model does, because threads may still be writing.
using JobSavesPointer = std::unique_ptr<JobSaves, void (*)(JobSaves*)>;

/// Complete where <lockstep/checkpoint.hpp> is included.
struct CheckpointDefinitions;

template <class Job>
constexpr bool has_checkpoint_definitions() {
#if defined(LOCKSTEP_COMPILED)
  return true;
#else
  return requires { sizeof(std::conditional_t<true, CheckpointDefinitions, Job>); };
#endif
}

/// A program that does not save was told to.
[[noreturn, gnu::cold]] void refuse_checkpoint_flags(Rank rank);

/// `Checkpoints` of a trainer, which knows by itself where its loops are: a base of `Job`, which it
/// asks for its wrapper (`wrapped_`) and for how far it is (`progress_`, `course()`,
/// `data_position()`). A program that calls a public member, wherever, has the hook through which
/// the job's loops come back here.
template <class Job>
class JobCheckpoints {
 public:
  /// Checkpoints have the value of this variable of the program, each rank's own, and `resume`
  /// gives it back: a number, a bool, a text, a vector of numbers, a `RandomStream`. The variable
  /// must outlive the job's last step. To be called before anything is resumed.
  template <class T>
  void keep(std::string_view name, T& value) {
    if (name.starts_with("lockstep/"))
      fail("keep", {"names that begin with lockstep/ are lockstep's own"},
           "give the value another name", job().rank());
    saves().kept.add(name, value);
  }

  /// Saves the job as it is: between two batches of a loop, it goes on with the second. Between the
  /// micro-batches of a step the save is carried out after its update, when the loop's body has
  /// ended; the values of the options must live until then. **Ranks** all, with the same path.
  /// **Host** blocks until the file is written, or with `.asynchronous` until all that is saved was
  /// copied.
  void save(const std::string& path, SaveOptions options = {}) {
    [[maybe_unused]] const auto on = job().enter("save");
    const bool waits = wrapped().micro_batches() != 0 && !options.parameters_only;
    if (options.asynchronous || waits) watch_steps();
    if (waits) {
      saves().waiting.emplace_back(path, std::move(options));
      return;
    }
    with_job(wrapped(), JobCall::save, [&](const StatefulJob& state) {
      saves().writer.save_job(state, path, save_options(std::move(options)));
    });
  }

  /// Loads parameters, buffers and the optimizer with its numbers, schedule and loss scale. The
  /// epochs of this job begin as they would have. **Ranks** all. **Host** blocks.
  LoadReport load(const std::string& path, const LoadOptions& options = {}) {
    [[maybe_unused]] const auto on = job().enter("load");
    const bool own_curve = job().progress_.curve.is_own(job().wrapped_);
    LoadReport report = lockstep::load(wrapped(), path, options);
    job().progress_.curve.adopt(job().wrapped_, own_curve);
    return report;
  }
  /// Loads parameters and buffers from any safetensors file. **Ranks** all. **Host** blocks.
  LoadReport load_parameters(const std::string& path, const LoadOptions& options = {}) {
    [[maybe_unused]] const auto on = job().enter("load_parameters");
    return lockstep::load_parameters(wrapped(), path, options);
  }

  /// Goes on where a checkpoint was saved, or the newest valid one of a folder: loads all that
  /// `load` does and the values that are kept; the next calls of `epochs` go on with the first
  /// batch that was not stepped. **Ranks** all. **Host** blocks.
  Resumed resume(const std::string& where, const LoadOptions& options = {}) {
    [[maybe_unused]] const auto on = job().enter("resume");
    has_begun_ = true;
    Resumed resumed;
    with_job(wrapped(), JobCall::load, [&](const StatefulJob& state) {
      resumed = resume_from(state, checkpoint_at(state.ranks, where), options);
      if (saves().checkpoints) saves().checkpoints->begin_after(state, &resumed);
    });
    return resumed;
  }
  /// The same from the job's own folder, now and not in the first call of `epochs`, if the job is
  /// to go on: after `--resume`, or when its launcher has started it again. Nothing where it is
  /// not, or where there is no checkpoint; an error where all are damaged. **Ranks** all. **Host**
  /// blocks.
  std::optional<Resumed> resume() {
    [[maybe_unused]] const auto on = job().enter("resume");
    if (std::exchange(has_begun_, true)) {
      open_checkpoints();
      return std::nullopt;
    }
    return resume_from_folder();
  }

  /// Saves into a folder from now on, now and then; the options of the command line
  /// (`--checkpoint`,
  /// `--checkpoint-every`, `--keep`, `--best`, `--resume`) have precedence over these. **Ranks**
  /// all, before `epochs`. **Host** blocks.
  void checkpoints(const CheckpointOptions& options) {
    [[maybe_unused]] const auto on = job().enter("checkpoints");
    saves().checkpoints.reset();
    saves().checkpoints =
        std::make_unique<Checkpoints>(wrapped(), job().options_.checkpoint.over(options));
    watch_steps();
  }
  /// The folder: `latest()`, `best()`. Null where the job saves into none.
  Checkpoints* checkpoints() {
    open_checkpoints();
    return saves().checkpoints.get();
  }

  /// Waits until all checkpoints are written, and throws what went wrong; `launch` calls it when
  /// the program is done. **Ranks** all. **Host** blocks.
  void finish_saves() {
    [[maybe_unused]] const auto on = job().enter("save");
    if (job().saves_) checkpoint_hook<Job>->finish(&job());
  }

 protected:
  /// The first call of `epochs` comes after the program has set its numbers and kept its values:
  /// the job goes on from a checkpoint if it is to.
  void resume_if_wanted() {
    if (!has_begun_) begin(false);
  }

  /// Comes after every step of jobs that save. In a loop over data it is not yet time to: the
  /// loop's body may have more to do with its batch.
  [[gnu::cold, gnu::noinline]] void after_step() {
    if (!has_begun_) begin(true);
    if (!job().progress_.is_in_loop()) save_if_due();
  }

  /// Comes between two batches of a loop, and after each update of a rank that is through. Nothing
  /// is called through a pointer until something may be due.
  void save_if_due() {
    if (job().saves_ && job().saves_->may_be_due(wrapped().updates())) [[unlikely]]
      run_due();
  }
  /// Comes at the end of a loop over data, whose last update may be that of its tail.
  void save_after_loop() {
    if (job().saves_ && !job().saves_->waiting.empty()) run_due();
  }

  /// Comes at the end of every epoch.
  void save_epoch(bool is_last) {
    if (job().saves_) checkpoint_hook<Job>->end_epoch(&job(), is_last);
  }

 private:
  Job& job() { return static_cast<Job&>(*this); }
  auto& wrapped() { return job().wrapped_; }
  JobSaves& saves() {
    static_assert(has_checkpoint_definitions<Job>(),
                  "lockstep: a job that saves or resumes needs #include <lockstep/checkpoint.hpp>, "
                  "or <lockstep/lockstep.hpp>, which has everything");
    if (!job().saves_) {
      note(is_mentioned);
      job().saves_ = JobSavesPointer(new JobSaves, [](JobSaves* saves) { delete saves; });
    }
    return *job().saves_;
  }

  static JobCheckpoints& self(void* job) { return *static_cast<Job*>(job); }
  static constexpr CheckpointHook own_hook = {
      [](void* job, bool is_step) { JobCheckpoints::self(job).begin_saving(is_step); },
      [](void* job) { JobCheckpoints::self(job).save_what_is_due(); },
      [](void* job, bool is_last) { JobCheckpoints::self(job).save_at_end_of_epoch(is_last); },
      [](void* job) { JobCheckpoints::self(job).finish_all(); },
  };
  static inline const bool is_mentioned = (checkpoint_hook<Job> = &own_hook, true);
  static void note(const bool&) {}  // its definition is needed

  [[gnu::cold, gnu::noinline]] void run_due() { checkpoint_hook<Job>->save_if_due(&job()); }

  void save_what_is_due() {
    const auto make = [&] { return save_options({}); };
    const auto save = [&] {
      with_job(wrapped(), JobCall::save, [&](const StatefulJob& state) {
        saves().writer.rethrow_on_all(state);
        if (state.micro_batches == 0) save_waiting(state);
        if (saves().checkpoints) saves().checkpoints->save_if_due(state, make);
      });
    };
    if constexpr (Job::joins) {
      const auto meeting = wrapped().all_meet();
      save();
    } else {
      save();
    }
  }

  /// Saves that were asked for between the micro-batches of a step, now that it is over.
  void save_waiting(const StatefulJob& state) {
    for (auto& [path, options] : std::exchange(saves().waiting, {}))
      saves().writer.save_job(state, path, save_options(std::move(options)));
  }

  void save_at_end_of_epoch(bool is_last) {
    if (!saves().checkpoints) return;
    [[maybe_unused]] const auto on = job().enter("epochs");
    const auto make = [&] { return save_options({}); };
    saves().checkpoints->end_epoch(wrapped(), make, is_last);
  }

  void finish_all() {
    if (!saves().is_watching) return;
    // There is no update to wait for: micro-batches that none has used are left out.
    if (!saves().waiting.empty()) wrapped().drop_tail();
    with_job(wrapped(), JobCall::save, [&](const StatefulJob& state) {
      save_waiting(state);
      saves().writer.finish_with(state.ranks);
      if (saves().checkpoints) saves().checkpoints->finish_with(state.ranks);
    });
  }

  void watch_steps() {
    saves().is_watching = true;
    job().progress_.display.look_at_every_step();
  }

  /// The folder that the command line names, unless the program has opened it.
  void open_checkpoints() {
    if (!saves().checkpoints && job().options_.checkpoint.any()) checkpoints(CheckpointOptions{});
  }

  /// The job goes on from its own folder, if it is to.
  std::optional<Resumed> resume_from_folder() {
    open_checkpoints();
    std::optional<Resumed> resumed;
    if (!saves().checkpoints) return resumed;
    with_job(wrapped(), JobCall::load, [&](const StatefulJob& state) {
      if (const auto path = saves().checkpoints->find_newest(state.ranks))
        resumed = resume_from(state, *path, {});
      saves().checkpoints->begin_after(state, resumed ? &*resumed : nullptr);
    });
    return resumed;
  }

  [[gnu::cold, gnu::noinline]] void begin(bool is_step) {
    has_begun_ = true;
    if (checkpoint_hook<Job> != nullptr) {
      checkpoint_hook<Job>->begin(&job(), is_step);
    } else if (job().options_.checkpoint.any()) {
      refuse_checkpoint_flags(job().rank());
    }
  }
  void begin_saving(bool is_step) {
    if (!is_step) {
      resume_from_folder();
      return;
    }
    open_checkpoints();
    if (saves().checkpoints && saves().checkpoints->will_resume())
      throw Error("step", "the job is to go on from a checkpoint, and has begun without one",
                  "call job.resume() or job.epochs() before the first step", job().rank());
  }

  /// The options with all that the trainer knows.
  SaveOptions save_options(SaveOptions options) {
    const InJobCall in(JobCall::save);
    saves().course = job().course();
    options.epoch = job().progress_.epoch_number();
    options.position = job().data_position();
    if (options.scores.empty()) options.scores = job().summary().scores;
    if (!options.best && saves().checkpoints) options.best = saves().checkpoints->best();
    for (const KeptValue& value : saves().kept) options.values.add(value);
    for (const KeptValue& value : saves().course.values()) options.common.add(value);
    return options;
  }

  Resumed resume_from(const StatefulJob& state, const std::string& path, LoadOptions options) {
    CourseState course;
    const bool knows_course = has_course(state.ranks, path);
    for (const KeptValue& value : saves().kept) options.values.add(value);
    if (knows_course) {
      for (const KeptValue& value : course.values()) options.common.add(value);
    }
    Resumed resumed = load_job(state, path, options, LoadWhat::job);
    if (!knows_course) {  // a loop of the program's own has saved it
      course.run = 1;
      course.epoch = resumed.epoch;
      course.loop = resumed.position ? 1 : 0;
    }
    job().progress_.go_on(course, resumed.position);
    if (job().progress_.log) {
      JsonLine line;
      line.add("from", resumed.path).add("epoch", begun_epochs(resumed)).add("step", resumed.step);
      job().progress_.log.write(
          JsonLine().add("resumed", line.add("world", resumed.world.value())));
    }
    return resumed;
  }

  bool has_begun_ = false;  // the first epochs or step have come
};

}  // namespace lockstep::detail
