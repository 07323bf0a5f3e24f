// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The epochs of a trainer: their figures, their lines and records, and where they go on.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/call.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/terminal.hpp"
#include "lockstep/data/sampler_state.hpp"
#include "lockstep/observe/epoch_summary.hpp"
#include "lockstep/observe/log_file.hpp"
#include "lockstep/observe/phase_times.hpp"
#include "lockstep/observe/progress_display.hpp"
#include "lockstep/trainer/course_state.hpp"
#include "lockstep/trainer/epochs.hpp"
#include "lockstep/trainer/going_on.hpp"
#include "lockstep/trainer/job_agreement.hpp"
#include "lockstep/trainer/job_base.hpp"
#include "lockstep/trainer/log_fields.hpp"
#include "lockstep/trainer/place_in_data.hpp"
#include "lockstep/trainer/run_curve.hpp"
#include "lockstep/trainer/run_log.hpp"

namespace lockstep::detail {

/// What `EpochRange`, `TrainingEpoch` and `EpochBatches` tell a trainer, and what it makes of it.
template <class Model, class Policies>
class JobEpochs : public JobBase<Model, Policies> {
  using Base = JobBase<Model, Policies>;
  using Accumulation = Pick<axes::Accumulate, Policies>;

 protected:
  using Base::comm_;
  using Base::options_;
  using Base::session_;
  using Base::wrapped_;
  using typename Base::traits;

 public:
  using Base::rank;
  using Base::schedule;
  using typename Base::sampler;

  /// Adds a field to the epoch's record in the file of `--log`: `job.log_field("reward", 3.5)`. The
  /// last value counts; rank 0's is written. Between epochs it is the next epoch's.
  template <JsonScalar T>
  void log_field(std::string_view name, const T& value) {
    if (log_) fields_.set(name, value);
  }

  /// The position of the job in its data: after the last batch that was stepped. To go on from
  /// there, with this number of ranks or another, call `resume` before `epochs`.
  SamplerState position() const { return place_.after(display_.steps()); }
  void resume(const SamplerState& position) {
    resumed_ = GoingOn::at(position);
    runs_ = 0;
  }

  /// The epoch that is under way, or the last.
  EpochSummary summary() const {
    EpochSummary now = closed_ ? *closed_ : display_.summary();
    now.scores = Scores(shown_scores_);
    return now;
  }

 protected:
  template <class, Dataset>
  friend class EpochBatches;
  template <class>
  friend class TrainingEpoch;
  template <class>
  friend class EpochRange;

  template <class Source>
  JobEpochs(Session& session, Source&& source, TrainerOptions&& options)
      : Base(session, std::forward<Source>(source), std::move(options)),
        display_(session.rank() == Rank{0}
                     ? detect_terminal(stdout, options_.progress.value_or(progress_style()))
                     : Terminal{}),
        log_(options_.log.empty() ? LogFile() : LogFile(options_.log, session.rank())) {
    if (log_) {
      log_.write(run_header(this->world_size(), options_.seed, Base::fingerprint(wrapped_.model()),
                            policy_fields(typename Policies::pack{})));
    }
  }

  /// Counts a step. Returns whether the display has looked at its clock.
  template <class Loss>
  bool count_step(const Loss& loss, std::size_t samples) {
    losses_.add(loss, samples);
    if constexpr (traits::joins) own_samples_ += samples;
    return display_.step(samples * this->world_size().value(), losses_.latest());
  }

  /// The scores of an evaluation, for the epoch's line.
  void show(const Scores& scores, std::string_view name) {
    for (Score score : scores) {
      score.name.insert(0, std::string(name) + "_");
      shown_scores_.push_back(std::move(score));
    }
  }

  /// Is this a loop over data, whose losses are yet to be added up?
  bool is_in_data() const { return opened_ && !closed_; }
  /// Is this any loop over data?
  bool is_in_loop() const { return under_way_ && loops_ != 0 && !loop_is_over_; }

  /// A call of `epochs` begins. Returns its first epoch: after `go_on` that one which was under
  /// way, or none (`count`) where the call was over.
  std::uint64_t begin_epochs(std::uint64_t count) {
    ++runs_;
    next_epoch_ = 0;
    if (!resumed_ || runs_ > resumed_->course.run) {
      resumed_.reset();
      curve_.forget();
    } else {
      next_epoch_ = runs_ < resumed_->course.run ? count : resumed_->course.epoch;
    }
    return next_epoch_;
  }

  void begin_run() { curve_.begin_run(); }

  void begin_epoch(std::uint64_t number, std::uint64_t last) {
    [[maybe_unused]] const auto on = this->enter("epochs");
    const InJobCall in(JobCall::epochs);
    require_same_numbers(comm_, wrapped_, traits::groups::count);
    if (resumed_ && number > resumed_->course.epoch) resumed_.reset();
    next_epoch_ = epoch_ = number;
    epochs_ = last;
    wrapped_.set_epoch(number);
    times_.begin_epoch();
    shown_scores_.clear();
    closed_.reset();
    loops_ = 0;
    opened_ = printed_ = false;
    under_way_ = true;
    display_.begin_epoch(number + 1, last, 0);
    if (resumed_ && resumed_->has_figures && resumed_->course.loop != 0) go_on_in_epoch();
  }

  /// A loop over data begins; after `go_on` that one which was under way, at its place.
  void begin_data(sampler& fresh) {
    ++loops_;
    fresh.start();
    loop_is_over_ = false;
    resumes_loop_ = false;
    if (resumed_) {
      loop_is_over_ = resumed_->is_over(loops_);
      resumes_loop_ = resumed_->resumes(loops_);
    }
    if (loop_is_over_) {
      SamplerState end = fresh.state();
      end.position = fresh.size();
      fresh.resume(end);
    } else if (resumes_loop_ && resumed_->position) {
      SamplerState at = *resumed_->position;
      if constexpr (traits::joins) at = place_in_uneven(fresh, at);
      fresh.resume(at);
    }
    place_.begin(fresh.state());
  }

  void open_data(std::size_t batches) {
    if (loop_is_over_) return;
    if (Accumulation::updates_of(batches) == 0) {
      throw Error("epoch",
                  "it has " + std::to_string(batches) + " batches, and Accumulate<" +
                      std::to_string(Accumulation::micro_batches) +
                      ", Tail::drop> drops what is less than a step",
                  "accumulate less, make batches smaller, or choose Tail::step", rank());
    }
    if (loops_ == 1) {  // an epoch's first loop over data says how long the curve is
      const std::uint64_t updates = Accumulation::updates_of(batches);
      curve_.place(wrapped_, epoch_, epochs_, updates,
                   resumes_loop_ ? resumed_->updates_before(updates) : 0);
    }
    opened_ = true;
    display_.begin_epoch(epoch_ + 1, epochs_, batches);
    losses_.reset();
    own_samples_ = 0;
    if (resumes_loop_ && resumed_->has_figures) {
      display_.go_on(resumed_->course.figures());
      const std::vector<double> own =
          resumed_->course.losses_of(rank().value(), this->world_size().value());
      losses_.set_totals({own[0], own[1]});
      own_samples_ = static_cast<std::uint64_t>(own[1]);
    }
    place_.set_steps(display_.steps());
    if (resumes_loop_) resumed_.reset();
    if constexpr (traits::joins) wrapped_.begin_join();
  }

  /// The loop has the next batch; `over` counts it.
  void note_batch(const SamplerState& over) { place_.note_batch(over, display_.steps()); }

  /// The loop is done with its batch, whether or not that was stepped.
  void end_batch() { place_.end_batch(); }

  /// The loop has no more batches, or a `break` has ended it. Where other ranks have some,
  /// `after_update()` is called after each of their steps.
  template <class F>
  void leave_data(std::chrono::duration<double> waits, [[maybe_unused]] const F& after_update) {
    if constexpr (traits::joins) wrapped_.finish_join(after_update);
    // A loop that was over when the job was saved has its averages already.
    if (!std::exchange(loop_is_over_, true)) average_buffers(JobCall::batches);
    close_data(waits);
  }

  /// Adds up the losses of all ranks, once an epoch. `waits` is how long the loop waited for data.
  void close_data(std::chrono::duration<double> waits = {}) {
    if (!opened_ || closed_) return;
    const InJobCall in(JobCall::batches);
    [[maybe_unused]] const auto on = wrapped_.on_device();
    end_accumulation();
    wrapped_.require_finite();
    closed_ = display_.summary();
    times_.set_waits(waits);
    const auto [sum, samples] = losses_.totals();
    double totals[] = {sum, samples};
    comm_.all_reduce(totals, Sum{});
    if (totals[1] > 0) closed_->loss = totals[0] / totals[1];
    if constexpr (traits::joins) count_all_ranks(*closed_);
    scores_of_data_ = shown_scores_.size();
    display_.clear();
  }

  /// `leave()` leaves the data.
  template <class Leave>
  void leave_data_after_break(const Leave& leave) noexcept {
    this->after_break(leave);
    if (this->is_held_up_) under_way_ = false;
  }

  void end_epoch() {
    under_way_ = false;
    next_epoch_ = epoch_ + 1;
    close_data();
    average_buffers(JobCall::epochs);  // of steps outside of loops over data
    if (rank() != Rank{0} || !closed_) return;
    if (!printed_ && !display_.is_quiet()) display_.print(summary().text());
    if (!log_) return;
    JsonLine record = summary().json().add("lr", wrapped_.learning_rate());
    record.add(times_.json(closed_->seconds));
    fields_.move_to(record);
    log_.write(record);
  }

  void mark_as_printed() { printed_ = true; }

  // For checkpoints.

  /// How far the loops are. **Ranks** all. **Host** blocks.
  CourseState course() {
    CourseState state;
    state.run = runs_;
    state.epoch = next_epoch_;
    curve_.tell(state);
    state.skipped = skipped_;
    state.is_closed = closed_.has_value();
    EpochSummary now = closed_ ? *closed_ : display_.summary();
    if constexpr (traits::joins) {
      if (!closed_) count_all_ranks(now);
    }
    state.set_figures(now);
    // The program evaluates once more when it goes on behind the data.
    std::vector<Score> scores = shown_scores_;
    if (under_way_ && loop_is_over_ && closed_) scores.resize(scores_of_data_);
    state.set_scores(scores);
    if (!under_way_) return state;
    state.loop = loops_;
    state.loop_is_over = loop_is_over_;
    const auto [sum, samples] = losses_.totals();
    const double own[] = {sum, samples};
    state.losses.resize(2 * this->world_size().value());
    comm_.all_gather(own, state.losses);
    return state;
  }

  /// The next calls of `epochs` go on where `course` and `position` were taken.
  void go_on(const CourseState& course, const std::optional<SamplerState>& position) {
    resumed_ = {course, position, true};
    runs_ = 0;
    curve_.go_on(course);
    skipped_ = course.skipped;
    under_way_ = opened_ = false;
    closed_.reset();
    shown_scores_.clear();
    if (course.loop != 0 || !course.is_closed) return;
    closed_ = course.figures();  // of the last epoch, until the next begins
    shown_scores_ = course.scores();
  }

  /// The epoch that is under way, or the next; from 0.
  std::uint64_t epoch_number() const { return next_epoch_; }
  bool is_in_epoch() const { return under_way_; }
  bool is_last_epoch() const { return epoch_ + 1 >= epochs_; }
  /// The position in the data of the epoch that is under way.
  /// Ranks that are through have made fewer draws than others. **Ranks** all.
  std::optional<SamplerState> data_position() {
    if (!under_way_ || loops_ == 0) return std::nullopt;
    SamplerState at = position();
    if constexpr (traits::joins) {
      std::uint64_t most[] = {at.position};
      comm_.all_reduce(most, Max{});
      at.position = most[0];
    }
    return at;
  }

  /// Loaded numbers have the curve of another run: `had_own` is `has_own_curve` before.
  bool has_own_curve() { return curve_.is_own(wrapped_); }
  void adopt_curve(bool had_own) { curve_.adopt(wrapped_, had_own); }

  ProgressDisplay display_;
  LogFile log_;
  PhaseTimes times_;

 private:
  void go_on_in_epoch() {
    const CourseState& course = resumed_->course;
    shown_scores_ = course.scores();
    scores_of_data_ = shown_scores_.size();
    if (!course.is_closed) return;
    display_.go_on(course.figures());
    closed_ = course.figures();
    closed_->epochs = epochs_;
    opened_ = true;
  }

  /// Ranks have different numbers of steps and samples. **Ranks** all. **Host** blocks.
  void count_all_ranks(EpochSummary& summary) {
    std::uint64_t samples[] = {own_samples_};
    comm_.all_reduce(samples, Sum{});
    std::uint64_t steps[] = {summary.steps};
    comm_.all_reduce(steps, Max{});
    summary.samples = samples[0];
    summary.steps = steps[0];
  }

  /// With `Buffers<Synced>`. **Ranks** all. **Host** blocks, or on a GPU enqueues.
  void average_buffers([[maybe_unused]] JobCall call) {
    if constexpr (traits::averages_buffers) {
      const InJobCall in(call);
      wrapped_.synchronize_buffers();
    }
  }

  /// What is too little for a step is no part of the next epoch's first one.
  void end_accumulation() {
    if constexpr (Accumulation::micro_batches > 1) {
      if constexpr (Accumulation::tail == Tail::step) {
        wrapped_.step_tail();
      } else {
        wrapped_.drop_tail();
      }
    }
    if constexpr (traits::skips_anomalies) {
      const std::uint64_t skipped = wrapped_.skipped_steps();
      if (skipped != skipped_)
        shown_scores_.push_back({"skipped", static_cast<double>(skipped - skipped_)});
      skipped_ = skipped;
    }
  }

  LogFields fields_;
  std::uint64_t runs_ = 0;  // calls of `epochs`
  std::uint64_t epoch_ = 0;
  std::uint64_t next_epoch_ = 0;  // the epoch that is under way, or the one after the last
  std::uint64_t epochs_ = 0;
  std::uint64_t loops_ = 0;    // over data, in this epoch
  std::uint64_t skipped_ = 0;  // steps that `Anomaly<Skip>` has left out so far
  RunCurve curve_;
  decltype(std::declval<typename Base::wrapper&>().loss_meter()) losses_ = wrapped_.loss_meter();
  std::vector<Score> shown_scores_;
  std::size_t scores_of_data_ = 0;  // those of the scores that came before the end of the data
  std::optional<EpochSummary> closed_;
  std::optional<GoingOn> resumed_;
  PlaceInData place_;
  std::uint64_t own_samples_ = 0;  // of this rank in this loop, where ranks have different numbers
  bool under_way_ = false;         // an epoch that has not ended
  bool opened_ = false;
  bool printed_ = false;
  bool loop_is_over_ = false;
  bool resumes_loop_ = false;
};

}  // namespace lockstep::detail
