// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `for (auto epoch : job.epochs(10)) for (const auto& batch : epoch.batches(train, 64))`.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <string>

#include "lockstep/comm/call.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/observe/epoch_summary.hpp"
#include "lockstep/trainer/job_agreement.hpp"

namespace lockstep::detail {

/// Tells, in a destructor, whether an exception ends the scope that the object was made in.
class Unwinding {
 public:
  bool is_exception() const { return std::uncaught_exceptions() > at_first_; }

 private:
  int at_first_ = std::uncaught_exceptions();
};

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
      batches_->trainer_.note_batch(batches_->sampler_.state());
      if (at_ == std::default_sentinel) {
        batches_->trainer_.leave_data(batches_->loader_.waited());
      }
    }

    EpochBatches* batches_;
    typename Loader::Iterator at_;
  };

  Iterator begin() {
    const Seed seed = trainer_.sampler_options().seed;
    if constexpr (Trainer::joins) {
      trainer_.own_wrapper().require_joined("batches");
      trainer_.begin_data(sampler_);
      const InJobCall in(JobCall::batches);
      const std::size_t most = most_batches(trainer_.own_communicator(), size(), seed);
      if (most == 0) refuse_nothing();
      trainer_.open_data(most);
    } else {
      {
        const InJobCall in(JobCall::batches);
        require_same_data(trainer_.own_communicator(), sampler_.samples(), options_, seed,
                          Trainer::feed::sends);
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
    if (!unwinds_.is_exception()) {
      trainer_.leave_data_after_break(loader_.waited());
    } else if constexpr (Trainer::joins) {
      trainer_.own_wrapper().leave_join();
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

  /// A rank with one batch more than another would wait for it forever. With `Exact` every rank
  /// knows that before the first batch.
  void require_even() const {
    const std::size_t world = trainer_.world_size().value();
    const Rank last{world - 1};
    if (batches_from(0, Rank{0}) == 0 && batches_from(0, last) == 0) refuse_nothing();
    const std::size_t begun = sampler_.state().first;  // by another world, which has stopped
    const std::size_t most = batches_from(begun, Rank{0});
    const std::size_t least = batches_from(begun, last);
    if (most == least) return;
    throw Error("epoch",
                "rank 0 has " + std::to_string(most) + " batches and rank " +
                    std::to_string(world - 1) + " has " + std::to_string(least),
                begun == 0
                    ? "train with Padding, DropLast or Masked, with a batch size that divides, or "
                      "with UnevenInputs<Join>"
                    : "resume with a number of ranks or a batch size that divides what is left",
                trainer_.rank());
  }

  [[noreturn]] void refuse_nothing() const {
    throw Error("epoch",
                "there is no batch to train on: " + std::to_string(sampler_.samples()) +
                    " samples among " + std::to_string(trainer_.world_size().value()) +
                    " ranks, in batches of " + std::to_string(options_.batch_size),
                "make batches smaller, or leave drop_last and DropLast out", trainer_.rank());
  }

  Trainer& trainer_;
  LoaderOptions options_;
  Sampling sampler_;
  Loader loader_;
  Unwinding unwinds_;
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
  void mark_as_printed() const { trainer_->mark_as_printed(); }

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
    trainer_.begin_run();
    return {trainer_, first_, last_};
  }
  std::default_sentinel_t end() const { return {}; }

  /// A `break` ends its epoch: the epoch has its line and its record.
  ~EpochRange() {
    if (!unwinds_.is_exception()) trainer_.end_epoch_after_break();
  }
  EpochRange(const EpochRange&) = delete;
  EpochRange& operator=(const EpochRange&) = delete;

 private:
  Trainer& trainer_;
  std::uint64_t first_;
  std::uint64_t last_;
  Unwinding unwinds_;
};

}  // namespace lockstep::detail
