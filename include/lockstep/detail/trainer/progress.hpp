// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The progress of a trainer's loops: positions, metrics, printed lines and log records.

#include "lockstep/detail/observe/display.hpp"
#include "lockstep/detail/trainer/options.hpp"

namespace lockstep::detail {

/// The loops' part of a checkpoint, equal on all ranks. Calls of `epochs`, and loops over data in
/// an epoch, count from 1: a resumed program skips those that were over.
struct TrainingProgress {
  std::uint64_t run = 0;    ///< calls of `epochs`
  std::uint64_t epoch = 0;  ///< the current or the next; from 0
  std::uint64_t loop = 0;   ///< loops over data begun in the current epoch
  bool loop_is_over = false;
  bool is_closed = false;  ///< were the losses of the epoch's data reduced?

  /// Of the current epoch so far, or of the last.
  EpochSummary metrics{};
  double loss = 0;             ///< the mean so far; over all ranks if `is_closed`
  std::vector<double> losses;  ///< sum and samples of every rank
  std::string score_names;     ///< of the epoch's scores: each ends in a newline
  std::vector<double> score_means;
  std::vector<double> score_counts;
  std::uint64_t skipped = 0;  ///< updates skipped before this epoch

  // A schedule without a length is as long as the epochs of one `epochs` call.
  std::uint64_t run_steps = 0;      ///< the length set by the trainer
  std::uint64_t epoch_updates = 0;  ///< of a whole epoch

  // For a job that is resumed.
  std::optional<SamplerState> position{};
  bool has_metrics = true;  ///< else only a position was given
};

/// Knows neither model nor ranks: the trainer adds what depends on them.
class EpochProgress {
 public:
  EpochProgress(Rank rank, const TrainerOptions& options);

  /// Writes the run's first log line: `{"run":{"time":...}}`. `policies`: axes and their policies.
  void log_run(WorldSize world, Seed seed, std::uint64_t fingerprint,
               std::initializer_list<std::pair<std::string_view, std::string_view>> policies);
  /// Adds a field to the epoch's record; throws if lockstep has a field of that name.
  void set_field(std::string_view name, JsonLine field);

  /// After the last batch that was stepped, or whose loop body has ended.
  SamplerState position() const {
    SamplerState at = loop_begin_;
    at.position = display.steps() > steps_before_batch_ ? with_batch_ : before_batch_;
    return at;
  }
  void resume(const SamplerState& position);
  /// The next calls of `epochs` continue where `progress` was taken.
  void go_on(const TrainingProgress& progress);

  /// The current epoch so far, or the last; `summary` adds the scores.
  EpochSummary metrics() const { return now_.is_closed ? now_.metrics : display.summary(); }
  EpochSummary summary() const;
  void show(const Scores& scores, std::string_view name);
  /// The updates that `Anomaly<Skip>` has skipped so far.
  void show_skipped(std::uint64_t skipped) {
    const std::uint64_t before = std::exchange(now_.skipped, skipped);
    if (skipped != before)
      shown_scores_.push_back({"skipped", static_cast<double>(skipped - before)});
  }

  /// In a loop over data whose losses are not reduced yet.
  bool is_in_data() const { return opened_ && !now_.is_closed; }
  bool is_in_epoch() const { return is_in_epoch_; }
  bool is_last_epoch() const { return now_.epoch + 1 >= epochs_; }
  /// Without scores; with metrics only if `is_closed`.
  const TrainingProgress& now() const { return now_; }

  /// Returns the first epoch: after `go_on` the saved one, or `count` if the call was over.
  std::uint64_t begin_epochs(std::uint64_t count);
  void begin_epoch(std::uint64_t number, std::uint64_t last);
  /// Begins an epoch's next loop over data, with a sampler in state `fresh` that draws `size`
  /// samples. Returns where the sampler continues, if not at its begin.
  std::optional<SamplerState> begin_loop(const SamplerState& fresh, std::size_t size);
  void set_position(const SamplerState& at) {
    loop_begin_ = at;
    with_batch_ = before_batch_ = at.position;
  }
  /// Returns the sum of losses and the samples that this rank starts with: its own in a world of
  /// the saved size, else the saved ranks are divided among these.
  std::array<double, 2> open_loop(std::size_t batches, Rank rank, WorldSize world);

  /// Has the program left the length of its schedule to the trainer?
  bool owns_schedule(auto& wrapped) const {
    if constexpr (requires { wrapped.schedule().steps = 0; })
      return wrapped.schedule().steps == 0 || wrapped.schedule().steps == now_.run_steps;
    return false;
  }
  /// Another run's options were loaded over such a schedule; the next `epochs` starts it anew.
  void adopt_schedule(auto& wrapped) {
    if constexpr (requires { wrapped.schedule().steps = 0; })
      now_.run_steps = wrapped.schedule().steps;
  }
  /// Begins the first loop of an epoch of `updates`. A call of `epochs` starts the schedule anew; a
  /// resumed one keeps its step, or its fraction of the epoch if `updates` has changed.
  void set_schedule_position(auto& wrapped, std::uint64_t updates) {
    if (now_.loop != 1) return;
    if constexpr (requires { wrapped.schedule().steps = 0; }) {
      if (std::exchange(run_begins_, false) && owns_schedule(wrapped)) {
        now_.run_steps = wrapped.schedule().steps = epochs_ * updates;
        const bool stays = std::exchange(goes_on_, false) && now_.epoch_updates == updates;
        if (!stays) wrapped.begin_schedule(now_.epoch * updates + updates_before(updates));
      }
    }
    now_.epoch_updates = updates;
  }

  /// The loop has the next batch; `over` draws include it.
  void note_batch(std::size_t over) {
    before_batch_ = std::exchange(with_batch_, over);
    steps_before_batch_ = display.steps();
  }
  /// The loop body has ended, whether or not it stepped the batch.
  void end_batch() { before_batch_ = with_batch_; }
  /// Returns whether the loop was over when the job was saved.
  bool end_loop() { return std::exchange(now_.loop_is_over, true); }
  /// The losses of the epoch's data are reduced: `now` has the mean over all ranks.
  void close(const EpochSummary& now) {
    now_.metrics = now;
    now_.is_closed = true;
    scores_of_data_ = shown_scores_.size();
    display.clear();
  }
  /// Ends the epoch, even if what follows fails.
  void leave_epoch() {
    abort_epoch();
    ++now_.epoch;
  }
  void abort_epoch() {
    is_in_epoch_ = now_.loop_is_over = false;
    now_.loop = 0;
  }
  /// The epoch's line and record, on rank 0.
  void report_epoch(double learning_rate);
  void mark_as_printed() { printed_ = true; }

  /// For checkpoints: all but the losses by rank; `now` has all ranks' metrics.
  TrainingProgress training_progress(const EpochSummary& now) const;

  ProgressDisplay display;
  LogFile log;
  PhaseTimes times;

 private:
  /// The epoch's updates before the position at which its loop continues.
  std::uint64_t updates_before(std::uint64_t updates) const {
    if (!resumes_loop_ || !resumed_ || !resumed_->position) return 0;
    const SamplerState& at = *resumed_->position;
    if (at.samples == 0) return 0;
    const auto over = static_cast<double>(at.first + at.position * at.world.value());
    const double fraction = std::fmin(over / static_cast<double>(at.samples), 1);
    return static_cast<std::uint64_t>(std::lround(fraction * static_cast<double>(updates)));
  }
  void take_metrics(const TrainingProgress& progress);

  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  TrainingProgress now_;
  std::optional<TrainingProgress> resumed_;
  std::vector<std::pair<std::string, JsonLine>> fields_;  // of the epoch's record
  std::uint64_t epochs_ = 0;
  std::vector<Score> shown_scores_;
  std::size_t scores_of_data_ = 0;  // scores from before the end of the data
  SamplerState loop_begin_;         // where the loop over data began
  std::size_t with_batch_ = 0;      // draws so far, with this batch
  std::size_t before_batch_ = 0;    // without it, until the loop body has ended
  std::uint64_t steps_before_batch_ = 0;
  bool is_in_epoch_ = false;  // an epoch has not ended
  bool opened_ = false;
  bool printed_ = false;
  bool resumes_loop_ = false;
  bool run_begins_ = false;  // a call of `epochs` has had no loop yet
  bool goes_on_ = false;     // the schedule is where a checkpoint had it
};

/// When a trainer's loops call `checkpoint_hook`.
enum class SaveMoment : std::uint8_t {
  first_epochs,  ///< the first call of `epochs`: the job may resume
  first_step,    ///< of a job without `epochs`
  due,           ///< something may have to be saved
  end_of_epoch,
  end_of_last_epoch,
  finish,
};

/// Saves and resumes a job; null without checkpoints. `JobSaving` sets it before `main`.
template <class Job>
inline void (*checkpoint_hook)(Job&, SaveMoment) = nullptr;

/// Defined in trainer/job_saves.hpp, which comes with <lockstep/checkpoint.hpp>.
template <class Job>
struct JobSaving;

}  // namespace lockstep::detail
