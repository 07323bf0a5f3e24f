// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The checkpoints of a trainer: saved now and then or when the program says so, and gone on
/// from.

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/options.hpp"
#include "lockstep/comm/call.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/observe/json_line.hpp"
#include "lockstep/strategy/tell_others.hpp"
#include "lockstep/trainer/checkpoint_calls.hpp"
#include "lockstep/trainer/checkpoints.hpp"
#include "lockstep/trainer/course_state.hpp"
#include "lockstep/trainer/job_epochs.hpp"
#include "lockstep/trainer/kept_values.hpp"
#include "lockstep/trainer/loading.hpp"
#include "lockstep/trainer/run_log.hpp"
#include "lockstep/trainer/saving.hpp"

namespace lockstep::detail {

/// `Checkpoints` of a trainer, which knows by itself where its loops are.
template <class Model, class Policies>
class JobCheckpoints : public JobEpochs<Model, Policies> {
  using Base = JobEpochs<Model, Policies>;

 protected:
  using Base::wrapped_;

 public:
  using Base::resume;

  /// Checkpoints have the value of this variable of the program, each rank's own, and `resume`
  /// gives it back: a number, a bool, a text, a vector of numbers, a `RandomStream`. The variable
  /// must outlive the job's last step. To be called before anything is resumed.
  template <class T>
  void keep(std::string_view name, T& value) {
    if (name.starts_with("lockstep/"))
      fail("keep", {"names that begin with lockstep/ are lockstep's own"},
           "give the value another name", this->rank());
    kept_.add(name, value);
  }

  /// Saves the job as it is: between two batches of a loop, it goes on with the second. Between the
  /// micro-batches of a step the save is carried out after its update, when the loop's body has
  /// ended; the values of the options must live until then. **Ranks** all, with the same path.
  /// **Host** blocks until the file is written, or with `.asynchronous` until all that is saved was
  /// copied.
  void save(const std::string& path, SaveOptions options = {}) {
    [[maybe_unused]] const auto on = this->enter("save");
    const bool waits = wrapped_.micro_batches() != 0 && !options.parameters_only;
    if (options.asynchronous || waits) watch_steps();
    if (waits) {
      waiting_.emplace_back(path, std::move(options));
    } else {
      save_now(path, std::move(options));
    }
  }

  /// Loads parameters, buffers and the optimizer with its numbers, schedule and loss scale. The
  /// epochs of this job begin as they would have. **Ranks** all. **Host** blocks.
  LoadReport load(const std::string& path, const LoadOptions& options = {}) {
    [[maybe_unused]] const auto on = this->enter("load");
    const bool own_curve = this->has_own_curve();
    LoadReport report = lockstep::load(wrapped_, path, options);
    this->adopt_curve(own_curve);
    return report;
  }
  /// Loads parameters and buffers from any safetensors file. **Ranks** all. **Host** blocks.
  LoadReport load_parameters(const std::string& path, const LoadOptions& options = {}) {
    [[maybe_unused]] const auto on = this->enter("load_parameters");
    return lockstep::load_parameters(wrapped_, path, options);
  }

  /// Goes on where a checkpoint was saved, or the newest valid one of a folder: loads all that
  /// `load` does and the values that are kept; the next calls of `epochs` go on with the first
  /// batch that was not stepped. **Ranks** all. **Host** blocks.
  Resumed resume(const std::string& where, const LoadOptions& options = {}) {
    [[maybe_unused]] const auto on = this->enter("resume");
    std::string path;
    with_joint_ranks(wrapped_, JobCall::load,
                     [&](const JointRanks& ranks) { path = checkpoint_at(ranks, where); });
    const Resumed resumed = resume_from(path, options);
    may_resume_ = false;
    if (checkpoints_) checkpoints_->begin_after(wrapped_, &resumed);
    return resumed;
  }
  /// The same from the job's own folder, now and not in the first call of `epochs`, if the job is
  /// to go on: after `--resume`, or when its launcher has started it again. Nothing where it is
  /// not, or where there is no checkpoint; an error where all are damaged. **Ranks** all. **Host**
  /// blocks.
  std::optional<Resumed> resume() {
    [[maybe_unused]] const auto on = this->enter("resume");
    open_checkpoints();
    std::optional<Resumed> resumed;
    if (!checkpoints_ || !std::exchange(may_resume_, false)) return resumed;
    if (const auto path = checkpoints_->find_newest(wrapped_)) resumed = resume_from(*path, {});
    checkpoints_->begin_after(wrapped_, resumed ? &*resumed : nullptr);
    return resumed;
  }

  /// Saves into a folder from now on, now and then; the options of the command line
  /// (`--checkpoint`,
  /// `--checkpoint-every`, `--keep`, `--best`, `--resume`) have precedence over these. **Ranks**
  /// all, before `epochs`. **Host** blocks.
  void checkpoints(const CheckpointOptions& options) {
    [[maybe_unused]] const auto on = this->enter("checkpoints");
    checkpoints_.reset();
    checkpoints_ = std::make_unique<Checkpoints>(wrapped_, this->options_.checkpoint.over(options));
    watch_steps();
  }
  /// The folder: `latest()`, `best()`. Null where the job saves into none.
  Checkpoints* checkpoints() {
    open_checkpoints();
    return checkpoints_.get();
  }

  /// Waits until all checkpoints are written, and throws what went wrong; `launch` calls it when
  /// the program is done. **Ranks** all. **Host** blocks.
  void finish_saves() {
    [[maybe_unused]] const auto on = this->enter("save");
    if (!is_watching_) return;
    carry_out_waiting(AtEnd::yes);
    saver_.finish(wrapped_);
    if (checkpoints_) checkpoints_->finish(wrapped_);
  }

 protected:
  template <class, Dataset>
  friend class EpochBatches;
  template <class>
  friend class EpochRange;

  using Base::Base;

  /// The first call of `epochs` comes after the program has set its numbers and kept its values.
  void resume_if_wanted() {
    if (may_resume_) resume();
    may_resume_ = false;
  }

  /// Comes after every step of jobs that save. In a loop over data it is not yet time to: the
  /// loop's body may have more to do with its batch.
  [[gnu::cold, gnu::noinline]] void after_step() {
    if (may_resume_) begin_without_epochs();
    if (!is_watching_) return;
    if constexpr (Base::is_one_process) {
      saver_.rethrow();
    } else {
      tell_others_of<Base::traits::alone>(this->comm_, [&] { saver_.rethrow(); });
    }
    if (checkpoints_) checkpoints_->rethrow(wrapped_);
    if (!this->is_in_loop() && has_saves()) save_if_due();
  }

  void end_batch() {
    Base::end_batch();
    if (has_saves()) save_if_due();
  }
  /// Where some ranks are through before others, all of them save after the same update.
  void leave_data(std::chrono::duration<double> waits) {
    if constexpr (Base::traits::joins) {
      if (has_saves() && wrapped_.is_joining())
        save_if_due();  // the batch that a `break` has ended
    }
    Base::leave_data(waits, [this] {
      if (has_saves()) save_if_due();
    });
    if (!waiting_.empty()) carry_out_waiting();  // the update was that of the loop's last batches
  }
  void leave_data_after_break(std::chrono::duration<double> waits) noexcept {
    Base::leave_data_after_break([&] { leave_data(waits); });
  }

  void end_epoch() { end_epoch(this->is_last_epoch()); }
  void end_epoch_after_break() noexcept {
    this->after_break([this] {
      if (this->is_in_epoch()) end_epoch(true);
    });
  }

 private:
  void end_epoch(bool is_last) {
    Base::end_epoch();
    if (!checkpoints_) return;
    [[maybe_unused]] const auto on = this->enter("epochs");
    checkpoints_->end_epoch(wrapped_, [&] { return save_options({}); }, is_last);
  }

  bool has_saves() const { return checkpoints_ || !waiting_.empty(); }
  void save_if_due() {
    const auto step = [&] {
      if (!waiting_.empty()) carry_out_waiting();
      if (checkpoints_) checkpoints_->step(wrapped_, [&] { return save_options({}); });
    };
    if constexpr (Base::traits::joins) {
      const auto meeting = wrapped_.all_meet();
      step();
    } else {
      step();
    }
  }

  void save_now(const std::string& path, SaveOptions options) {
    saver_.save(wrapped_, path, save_options(std::move(options)));
  }
  /// Saves that were asked for between the micro-batches of a step, now that it is over. At the end
  /// of the job there is none to wait for: micro-batches that no update has used are left out.
  enum class AtEnd : bool { no, yes };
  [[gnu::cold, gnu::noinline]] void carry_out_waiting(AtEnd at_end = AtEnd::no) {
    if (waiting_.empty()) return;
    if (at_end == AtEnd::yes) wrapped_.drop_tail();
    if (wrapped_.micro_batches() != 0) return;
    for (auto& [path, options] : std::exchange(waiting_, {})) save_now(path, std::move(options));
  }

  void watch_steps() {
    is_watching_ = true;
    this->display_.look_at_every_step();
  }

  /// The folder that the command line names, unless the program has opened it.
  void open_checkpoints() {
    if (!checkpoints_ && this->options_.checkpoint.any()) checkpoints(CheckpointOptions{});
  }

  /// A program that steps without `epochs` has to say when its numbers are set.
  [[gnu::cold, gnu::noinline]] void begin_without_epochs() {
    may_resume_ = false;
    open_checkpoints();
    if (!checkpoints_ || !checkpoints_->will_resume()) return;
    throw Error("step", "the job is to go on from a checkpoint, and has begun without one",
                "call job.resume() or job.epochs() before the first step", this->rank());
  }

  /// The options with all that the trainer knows.
  SaveOptions save_options(SaveOptions options) {
    const InJobCall in(JobCall::save);
    course_ = this->course();
    options.epoch = this->epoch_number();
    options.position = this->data_position();
    if (options.scores.empty()) options.scores = this->summary().scores;
    if (!options.best && checkpoints_) options.best = checkpoints_->best();
    for (const KeptValue& value : kept_) options.values.add(value);
    for (const KeptValue& value : course_.values()) options.common.add(value);
    return options;
  }

  Resumed resume_from(const std::string& path, LoadOptions options) {
    CourseState course;
    bool knows_course = false;
    with_joint_ranks(wrapped_, JobCall::load,
                     [&](const JointRanks& ranks) { knows_course = has_course(ranks, path); });
    for (const KeptValue& value : kept_) options.values.add(value);
    if (knows_course) {
      for (const KeptValue& value : course.values()) options.common.add(value);
    }
    Resumed resumed = lockstep::resume(wrapped_, path, options);
    if (!knows_course) {  // a loop of the program's own has saved it
      course.run = 1;
      course.epoch = resumed.epoch;
      course.loop = resumed.position ? 1 : 0;
    }
    this->go_on(course, resumed.position);
    if (this->log_) {
      JsonLine line;
      line.add("from", resumed.path).add("epoch", begun_epochs(resumed)).add("step", resumed.step);
      this->log_.write(JsonLine().add("resumed", line.add("world", resumed.world.value())));
    }
    return resumed;
  }

  KeptValues kept_;
  CourseState course_;                                        // of the latest save
  Saver saver_;                                               // of `save`
  std::vector<std::pair<std::string, SaveOptions>> waiting_;  // for the end of a step
  std::unique_ptr<Checkpoints> checkpoints_;
  bool may_resume_ = true;    // nothing has begun
  bool is_watching_ = false;  // something may be saved while steps go on
};

}  // namespace lockstep::detail
