// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The loops of a trainer, over epochs and over the batches of an epoch.

#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/trainer/progress.hpp"

namespace lockstep::detail {

/// The argument of `on_rank0`'s function: prints and logs, and cannot communicate.
class RunLog {
 public:
  explicit RunLog(EpochProgress& progress) : progress_(&progress) {}

  /// Prints a line of text above the progress bar.
  void print(std::string_view line) { progress_->display.print(line); }

  /// Prints anything with a `summary()`, such as an epoch, as one line.
  template <class Summarised>
    requires requires(const Summarised& what) { what.summary().text(); }
  void print(const Summarised& what) {
    what.mark_as_printed();
    print(what.summary().text());
  }

  /// Writes a line to the `--log` file, if there is one.
  void write(const JsonLine& line) { progress_->log.write(line); }

 private:
  EpochProgress* progress_;
};

/// This rank's batches of one epoch; calls the sampler's `set_epoch`.
template <class Trainer, Dataset Source>
class EpochBatches {
 public:
  using Sampling = typename Trainer::sampler;
  using Loader = typename Trainer::template loader<Source, Sampling>;

  EpochBatches(Trainer& trainer, Epoch epoch, const Source& source, LoaderOptions options)
      : trainer_(trainer),
        options_(taken(options)),
        sampler_(source.size(), trainer.world_size(), trainer.rank(), trainer.sampler_options()),
        loader_(trainer.feed_.make(source, sampler_, options_)) {
    sampler_.set_epoch(epoch);
  }

  /// The number of this rank's batches in a whole epoch.
  std::size_t size() const { return batches_from(0, trainer_.rank()); }

  class Iterator {
   public:
    using value_type = typename Source::batch_type;
    using difference_type = std::ptrdiff_t;

    explicit Iterator(EpochBatches& batches)
        : batches_(&batches),
          at_(batches.trainer_.fetch_batch([&] { return batches.loader_.begin(); })) {
      look();
    }

    const value_type& operator*() const { return *at_; }
    const value_type* operator->() const { return &*at_; }
    Iterator& operator++() {
      batches_->trainer_.end_batch();
      batches_->trainer_.fetch_batch([&] { ++at_; });
      look();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t end) const { return at_ == end; }

   private:
    /// At the end of the data, ranks reduce their losses.
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
      trainer_.require_same(trainer_.sampler_seed());
      const std::size_t most = trainer_.comm_.all_reduce(size(), Max{});
      if (most == 0) reject_nothing();
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

  /// A `break` ends the epoch's data as its last batch does: ranks reduce their losses.
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
  /// If ranks have data of their own, some may have none.
  static LoaderOptions taken(LoaderOptions options) {
    if constexpr (Trainer::joins) options.may_be_empty = true;
    return options;
  }

  /// The number of a rank's batches from index `first` of the epoch's order on.
  std::size_t batches_from(std::size_t first, Rank rank) const {
    const Share<typename Trainer::remainder> share(sampler_.samples(), sampler_.world(), rank,
                                                   first);
    return batch_count(share.size(), options_);
  }

  /// A rank with one batch more than another would wait forever. With `Exact`, all know in advance.
  void require_even() const {
    const WorldSize world = trainer_.world_size();
    const Rank last{world.value() - 1};
    if (batches_from(0, Rank{0}) == 0 && batches_from(0, last) == 0) reject_nothing();
    const std::size_t begun = sampler_.state().first;  // by the world that saved the job
    const std::size_t most = batches_from(begun, Rank{0});
    const std::size_t least = batches_from(begun, last);
    if (most == least) return;
    fail("epoch", {"rank 0 has ", most, " batches and rank ", last, " has ", least},
         begun == 0 ? "train with Padding, DropLast or Masked, with a batch size that divides, or "
                      "with UnevenInputs<Join>"
                    : "resume with a number of ranks or a batch size that divides what is left",
         trainer_.rank());
  }

  [[noreturn]] void reject_nothing() const {
    fail("epoch",
         {"there is no batch to train on: ", sampler_.samples(), " samples among ",
          trainer_.world_size(), " ranks, in batches of ", options_.batch_size},
         "make batches smaller, or leave drop_last and DropLast out", trainer_.rank());
  }

  Trainer& trainer_;
  LoaderOptions options_;
  Sampling sampler_;
  Loader loader_;
  EndOfScope scope_;
};

template <class Trainer>
class TrainingEpoch {
 public:
  TrainingEpoch(Trainer& trainer, std::uint64_t number) : trainer_(&trainer), number_(number) {}

  /// The number of the epoch, from 0.
  std::uint64_t number() const { return number_; }

  /// `batch_size` is of one rank. The data set must outlive the loop. **Ranks** all.
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
               auto options) = delete;  // the data set must outlive the loop

  /// The epoch so far; over all ranks at the end of its data.
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

    explicit Iterator(EpochRange& range) : range_(&range), number_(range.first_) { look(); }

    value_type operator*() const { return {range_->trainer_, number_}; }
    Iterator& operator++() {
      range_->trainer_.end_epoch();
      ++number_;
      look();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return number_ >= range_->last_; }

   private:
    void look() {
      if (number_ < range_->last_) range_->trainer_.begin_epoch(number_, range_->last_);
    }

    EpochRange* range_;
    std::uint64_t number_;
  };

  Iterator begin() { return Iterator(*this); }
  std::default_sentinel_t end() const { return {}; }

  /// An epoch that a `break` ends has its line and its record.
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
