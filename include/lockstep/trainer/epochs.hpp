// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `for (auto epoch : job.epochs(10)) for (const auto& batch : epoch.batches(train, 64))`:
/// the loops of a trainer, and how far they are.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/collective.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/core/json.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/observe/display.hpp"
#include "lockstep/observe/log.hpp"
#include "lockstep/observe/summary.hpp"
#include "lockstep/strategy/agreement.hpp"
#include "lockstep/trainer/options.hpp"
#include "lockstep/trainer/progress.hpp"

namespace lockstep::detail {

/// A policy's axis and the compiler's spelling of the policy, for the log.
struct PolicySpelling {
  std::string_view axis;
  std::string_view policy;
};

/// How far the loops of a trainer are, their figures, and their lines and records. It knows neither
/// model nor ranks: the trainer adds what needs them.
class EpochProgress {
 public:
  EpochProgress(Rank rank, const TrainerOptions& options);

  /// The first line that a run writes to its log: `{"run":{"time":...}}`.
  void log_run(WorldSize world, Seed seed, std::uint64_t fingerprint,
               const PolicySpelling* policies, std::size_t count);
  /// Adds a field to the epoch's record; throws where lockstep has a field of that name.
  void set_field(std::string_view name, JsonLine field);

  /// After the last batch that was stepped, or that the loop is done with.
  SamplerState position() const {
    SamplerState at = loop_begin_;
    at.position = display.steps() > steps_before_batch_ ? with_batch_ : before_batch_;
    return at;
  }
  void resume(const SamplerState& position);
  /// The next calls of `epochs` go on where `course` was taken.
  void go_on(const CourseState& course);

  /// The epoch that is under way, or the last: its figures so far, and with the scores shown.
  EpochSummary figures() const { return closed_ ? *closed_ : display.summary(); }
  EpochSummary summary() const;
  /// The scores of an evaluation, for the epoch's line.
  void show(const Scores& scores, std::string_view name);
  /// The updates that `Anomaly<Skip>` has left out so far.
  void show_skipped(std::uint64_t skipped);

  /// Is this a loop over data whose losses are yet to be added up? Is this any loop over data?
  bool is_in_data() const { return opened_ && !closed_; }
  bool is_in_loop() const { return under_way_ && loops_ != 0 && !loop_is_over_; }
  bool is_in_epoch() const { return under_way_; }
  bool is_last_epoch() const { return epoch_ + 1 >= epochs_; }
  bool is_closed() const { return closed_.has_value(); }
  /// The epoch that is under way, or the next; from 0.
  std::uint64_t epoch_number() const { return next_epoch_; }

  /// A call of `epochs` begins. Returns its first epoch: after `go_on` that one which was under
  /// way, or none (`count`) where the call was over.
  std::uint64_t begin_epochs(std::uint64_t count);
  void begin_epoch(std::uint64_t number, std::uint64_t last);
  /// An epoch's next loop over data begins, with a sampler in state `fresh` that draws `size`
  /// samples. Returns where the sampler goes on, if not at its begin.
  std::optional<SamplerState> begin_loop(const SamplerState& fresh, std::size_t size);
  bool loop_is_over() const { return loop_is_over_; }
  void place_loop(const SamplerState& at) {
    loop_begin_ = at;
    with_batch_ = before_batch_ = at.position;
  }
  /// The loop has so many batches. Returns the sum of losses and the samples that this rank goes on
  /// with.
  std::pair<double, double> open_loop(std::size_t batches, Rank rank, WorldSize world);
  /// The updates of the epoch's first loop say how long the learning rate's curve is.
  template <class Wrapped>
  void place_curve(Wrapped& wrapped, std::uint64_t updates) {
    if (loops_ != 1) return;
    curve.place(wrapped, epoch_, epochs_, updates,
                resumes_loop_ ? resumed_->updates_before(updates) : 0);
  }
  /// The loop has the next batch; `over` draws count it.
  void note_batch(std::size_t over) {
    before_batch_ = std::exchange(with_batch_, over);
    steps_before_batch_ = display.steps();
  }
  /// The loop is done with its batch, whether or not that was stepped.
  void end_batch() { before_batch_ = with_batch_; }
  /// Returns whether the loop was over already, when the job was saved.
  bool end_loop() { return std::exchange(loop_is_over_, true); }
  /// The losses of the epoch's data are added up: `now` has the mean over all ranks.
  void close(const EpochSummary& now);
  /// The epoch is over, whatever comes of its end.
  void leave_epoch();
  void abort_epoch() { under_way_ = false; }
  /// The epoch's line and record, on rank 0.
  void report_epoch(double learning_rate);
  void mark_as_printed() { printed_ = true; }

  /// For checkpoints: all but the losses of ranks; `now` are the figures of all ranks.
  CourseState course(const EpochSummary& now) const;
  bool has_loop() const { return under_way_ && loops_ != 0; }

  ProgressDisplay display;
  LogFile log;
  PhaseTimes times;
  RunCurve curve;

 private:
  std::vector<std::pair<std::string, JsonLine>> fields_;  // of the epoch's record
  std::uint64_t runs_ = 0;                                // calls of `epochs`
  std::uint64_t epoch_ = 0;
  std::uint64_t next_epoch_ = 0;  // the epoch that is under way, or the one after the last
  std::uint64_t epochs_ = 0;
  std::uint64_t loops_ = 0;    // over data, in this epoch
  std::uint64_t skipped_ = 0;  // steps that `Anomaly<Skip>` has left out so far
  std::vector<Score> shown_scores_;
  std::size_t scores_of_data_ = 0;  // those of the scores that came before the end of the data
  std::optional<EpochSummary> closed_;
  std::optional<CourseState> resumed_;
  SamplerState loop_begin_;       // where the loop over data began
  std::size_t with_batch_ = 0;    // draws that are over, this batch's included
  std::size_t before_batch_ = 0;  // without them, until the loop is done with the batch
  std::uint64_t steps_before_batch_ = 0;
  bool under_way_ = false;  // an epoch that has not ended
  bool opened_ = false;
  bool printed_ = false;
  bool loop_is_over_ = false;
  bool resumes_loop_ = false;
};

/// The object that `on_rank0` gives its function: it prints and logs, and cannot communicate.
class RunLog {
 public:
  explicit RunLog(EpochProgress& progress) : progress_(&progress) {}

  /// Prints a line of text, kept apart from the progress bar.
  void print(std::string_view line) { progress_->display.print(line); }

  /// Prints anything with a `summary()`, such as an epoch, as one line.
  template <class Summarised>
    requires requires(const Summarised& what) { what.summary().text(); }
  void print(const Summarised& what) {
    what.mark_as_printed();
    print(what.summary().text());
  }

  /// Writes a line to the file of `--log`, if there is one.
  void write(const JsonLine& line) { progress_->log.write(line); }

 private:
  EpochProgress* progress_;
};

/// A rank with one batch more than another would wait for it forever. With `Exact` every rank knows
/// that before the first batch: `most` are rank 0's, `least` the last rank's, from the place
/// `begun` on, which another world has reached.
[[noreturn]] void refuse_uneven_epoch(std::size_t most, std::size_t least, std::size_t begun,
                                      Rank rank, WorldSize world);
[[noreturn]] void refuse_empty_epoch(std::size_t samples, std::size_t batch_size, Rank rank,
                                     WorldSize world);
[[noreturn]] void refuse_negative_epochs(Rank rank);
/// A job of DP is one process; one of DDP has no replicas inside of a rank.
[[noreturn, gnu::cold]] void refuse_ranks_of_dp(WorldSize world, Rank rank);
[[noreturn, gnu::cold]] void refuse_replicas_of_ddp(Rank rank);
[[noreturn]] void refuse_inside_rank0(const char* operation, Rank rank);
[[noreturn]] void refuse_short_epoch(std::size_t batches, std::size_t micro_batches, Rank rank);

// What all ranks must have alike, in words that an error can show.

/// Adds the options of an optimizer or schedule to a text; `for_each` of options calls it.
struct OptionWriter {
  std::string& text;
  std::string whose;
  void operator()(std::string_view name, double value) const;
};
std::string title_of_group(std::size_t group);
/// Data of which other sizes or seeds on a rank would leave samples out or take them twice. Ranks
/// that are fed must also be fed as far ahead.
std::string describe_data(std::size_t samples, const LoaderOptions& options, Seed seed,
                          bool is_fed);
std::string describe_sampler(Seed seed);

/// **Ranks** all. **Host** blocks.
template <class Comm>
void require_same(Comm& comm, const std::string& text) {
  require_agreement(comm, hash_of(text), [&text] { return text; });
}

/// This rank's batches of one epoch. The sampler knows the epoch, so it cannot be forgotten.
template <class Trainer, Dataset Source>
class EpochBatches {
 public:
  using Sampling = typename Trainer::sampler;
  using Loader = typename Trainer::template loader<Source, Sampling>;

  EpochBatches(Trainer& trainer, Epoch epoch, const Source& source, LoaderOptions options)
      : trainer_(trainer),
        options_(taken(options)),
        sampler_(source.size(), trainer.world_size(), trainer.rank(), trainer.sampler_options()),
        loader_(trainer.make_loader(source, sampler_, options_)) {
    sampler_.set_epoch(epoch);
  }

  /// How many batches this rank has in a whole epoch.
  std::size_t size() const { return batches_from(0, trainer_.rank()); }

  class Iterator {
   public:
    using value_type = typename Source::batch_type;
    using difference_type = std::ptrdiff_t;

    explicit Iterator(EpochBatches& batches)
        : batches_(&batches), at_(batches.trainer_.fetch([&] { return batches.loader_.begin(); })) {
      look();
    }

    const value_type& operator*() const { return *at_; }
    const value_type* operator->() const { return &*at_; }
    Iterator& operator++() {
      batches_->trainer_.end_batch();
      batches_->trainer_.fetch([&] { ++at_; });
      look();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t end) const { return at_ == end; }

   private:
    /// At the end of the data, ranks add up their losses.
    void look() {
      batches_->trainer_.progress_.note_batch(batches_->sampler_.position());
      if (at_ == std::default_sentinel) {
        batches_->trainer_.leave_data(batches_->loader_.waited());
      }
    }

    EpochBatches* batches_;
    typename Loader::Iterator at_;
  };

  Iterator begin() {
    if constexpr (Trainer::joins) {
      trainer_.ddp().require_joined("batches");
      trainer_.begin_data(sampler_);
      const InJobCall in(JobCall::batches);
      const std::size_t most = trainer_.most_batches(size());
      if (most == 0) refuse_nothing();
      trainer_.open_data(most);
    } else {
      {
        const InJobCall in(JobCall::batches);
        trainer_.require_same_data(sampler_.samples(), options_, Trainer::feed::sends);
      }
      trainer_.begin_data(sampler_);
      require_even();
      trainer_.open_data(size());
    }
    return Iterator(*this);
  }
  std::default_sentinel_t end() const { return {}; }

  /// A `break` ends the epoch's data as its last batch does: ranks add up their losses.
  ~EpochBatches() {
    if (!scope_.is_exception()) {
      trainer_.leave_data_after_break(loader_.waited());
    } else if constexpr (Trainer::joins) {
      trainer_.ddp().leave_join();
    }
  }
  EpochBatches(const EpochBatches&) = delete;
  EpochBatches& operator=(const EpochBatches&) = delete;

 private:
  /// Where ranks have data of their own, some may have none.
  static LoaderOptions taken(LoaderOptions options) {
    if constexpr (Trainer::joins) options.may_be_empty = true;
    return options;
  }

  /// How many batches a rank has from a place of the epoch's order on.
  std::size_t batches_from(std::size_t first, Rank rank) const {
    const Share<typename Trainer::remainder> share(sampler_.samples(), sampler_.world(), rank,
                                                   first);
    return batch_count(share.size(), options_);
  }

  void require_even() const {
    const WorldSize world = trainer_.world_size();
    const Rank last{world.value() - 1};
    if (batches_from(0, Rank{0}) == 0 && batches_from(0, last) == 0) refuse_nothing();
    const std::size_t begun = sampler_.state().first;  // by another world, which has stopped
    const std::size_t most = batches_from(begun, Rank{0});
    const std::size_t least = batches_from(begun, last);
    if (most != least) refuse_uneven_epoch(most, least, begun, trainer_.rank(), world);
  }

  [[noreturn]] void refuse_nothing() const {
    refuse_empty_epoch(sampler_.samples(), options_.batch_size, trainer_.rank(),
                       trainer_.world_size());
  }

  Trainer& trainer_;
  LoaderOptions options_;
  Sampling sampler_;
  Loader loader_;
  EndOfScope scope_;
};

/// One pass over the data.
template <class Trainer>
class TrainingEpoch {
 public:
  TrainingEpoch(Trainer& trainer, std::uint64_t number) : trainer_(&trainer), number_(number) {}

  /// The number of the epoch, from 0.
  std::uint64_t number() const { return number_; }

  /// This rank's share, `batch_size` samples at a time (of this rank, as in PyTorch). The data set
  /// must outlive the loop. **Ranks** all.
  template <Dataset Source>
  auto batches(const Source& source, std::size_t batch_size) {
    LoaderOptions options = trainer_->loader_options();
    options.batch_size = batch_size;
    return EpochBatches<Trainer, Source>(*trainer_, Epoch{number_}, source, options);
  }
  template <Dataset Source>
  auto batches(const Source& source, LoaderOptions options) {
    options.timed = options.timed || trainer_->loader_options().timed;
    return EpochBatches<Trainer, Source>(*trainer_, Epoch{number_}, source, options);
  }
  template <Dataset Source>
  void batches(const Source&& source,
               auto options) = delete;  // it would be gone by the first batch

  /// The figures of the epoch so far; over all ranks once the data is at its end.
  EpochSummary summary() const { return trainer_->summary(); }
  void mark_as_printed() const { trainer_->progress_.mark_as_printed(); }

 private:
  Trainer* trainer_;
  std::uint64_t number_;
};

/// Epochs `first` to `last - 1`.
template <class Trainer>
class EpochRange {
 public:
  EpochRange(Trainer& trainer, std::uint64_t first, std::uint64_t last)
      : trainer_(trainer), first_(first), last_(last) {}

  class Iterator {
   public:
    using value_type = TrainingEpoch<Trainer>;
    using difference_type = std::ptrdiff_t;

    Iterator(Trainer& trainer, std::uint64_t number, std::uint64_t last)
        : trainer_(&trainer), number_(number), last_(last) {
      if (number_ < last_) trainer_->begin_epoch(number_, last_);
    }

    value_type operator*() const { return {*trainer_, number_}; }
    Iterator& operator++() {
      trainer_->end_epoch();
      if (++number_ < last_) trainer_->begin_epoch(number_, last_);
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return number_ >= last_; }

   private:
    Trainer* trainer_;
    std::uint64_t number_;
    std::uint64_t last_;
  };

  Iterator begin() {
    trainer_.progress_.curve.begin_run();
    return {trainer_, first_, last_};
  }
  std::default_sentinel_t end() const { return {}; }

  /// A `break` ends its epoch: the epoch has its line and its record.
  ~EpochRange() {
    if (!scope_.is_exception()) trainer_.end_epoch_after_break();
  }
  EpochRange(const EpochRange&) = delete;
  EpochRange& operator=(const EpochRange&) = delete;

 private:
  Trainer& trainer_;
  std::uint64_t first_;
  std::uint64_t last_;
  EndOfScope scope_;
};

}  // namespace lockstep::detail
