// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The batches of a rank that feeds others, or is fed: those of `LocalBatches`, read by one
/// rank for several.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/call/peers.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/feed.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/serialize.hpp"

namespace lockstep::detail {

/// The rounds of a loop over data, in a job with `Feed<LeaderOfGroup>` or
/// `Feed<ScatterThenBroadcast>`. Round t is the t-th batch of every rank that still has one. A rank
/// that reads loads all batches of a round before it sends the first, so that a failure reaches all
/// ranks that it feeds in place of the same batch.
///
/// A thread makes rounds ahead, as many as `prefetch` says; workers load on ranks that read. A loop
/// that is left early has asked for the same rounds on all ranks, and its end waits for them.
template <Dataset Source, Sampling Sampler, class Line>
class FedBatches {
 public:
  using batch_type = typename Source::batch_type;
  static constexpr bool collective = true;

  struct Slot {
    std::size_t round = 0;
    std::uint64_t number = 0;  ///< of all rounds of the line
    batch_type batch;
  };

  FedBatches(const Source& dataset, const LoaderOptions& options, Line& line)
      : options_(options),
        line_(line),
        loader_(dataset, options),
        batches_(line.route().carried.size()) {
    if (line.reads()) loads_.emplace(batches_.size() * slots(), options.workers, loader_);
  }

  /// Rounds are made ahead by a thread, whatever the number of workers: another rank's thread must
  /// not have to wait until this rank wants its batch.
  std::size_t slots() const { return std::max<std::size_t>(1, options_.prefetch) + 1; }
  std::size_t workers() const { return 1; }

  /// Returns how many rounds this rank has a part in. The feeding thread is idle.
  std::size_t begin(const Sampler& sampler, std::size_t) {
    shares_.clear();
    begin_ = sampler.position();
    // Where this rank has drawn all, so have the others: ranks end an epoch in one round.
    const bool is_over = begin_ != 0 && begin_ >= sampler.size();
    for (std::size_t i = 0; i != batches_.size(); ++i) {
      shares_.push_back(sampler.share_of(line_.route().carried[i]));
      const std::size_t draws = shares_[i].size();
      batches_[i] = is_over ? 0 : batch_count(draws - std::min(begin_, draws), options_);
    }
    rounds_ = *std::max_element(batches_.begin(), batches_.end());
    if (!loads_) return rounds_;
    loads_->clear();
    order_.emplace(sampler.whole());
    const SamplerState state = sampler.state();
    place_ = {{state.seed, state.epoch}, begin_ / options_.batch_size};
    next_round_ = next_ = 0;
    return rounds_;
  }

  void request(Slot& slot, const Sampler&, std::size_t round) {
    slot.round = round;
    slot.number = line_.ask();
  }

  void fill(Slot& slot) {
    const auto made = line_.begin(slot.number);
    const InJobCall in(JobCall::batches);
    if (loads_) {
      read(slot.round, slot.batch);
    } else {
      receive(slot.round, slot.batch);
    }
  }

  /// The end of the loader. Where an exception ends the loop on this rank alone, the others do not
  /// ask for what this one has asked for, and waiting for it would be in vain.
  void leave() {
    constexpr std::chrono::milliseconds grace{500};
    if (scope_.is_failure() && !line_.is_idle_within(grace)) line_.abandon(ended_by_exception);
  }

 private:
  /// The size of a batch that is not there, and the first number of a message: what it holds.
  static constexpr std::uint64_t no_batch = static_cast<std::uint64_t>(-1);
  enum Holds : std::uint64_t { batches, words };

  using Loader = LocalBatches<Source, Sampler>;
  using Loaded = typename Loader::Slot;

  /// Has the i-th carried rank a batch in this round?
  bool has_batch(std::size_t i, std::size_t round) const { return round < batches_[i]; }
  bool has_message(const FeedRoute::Hop& hop, std::size_t round) const {
    for (std::size_t i = hop.first; i != hop.first + hop.count; ++i)
      if (has_batch(i, round)) return true;
    return false;
  }

  /// Asks workers for the batches of this round and of the next ones.
  void request_loads() {
    for (; next_round_ != rounds_ && !loads_->full(); advance()) {
      if (!has_batch(next_, next_round_)) continue;
      loads_->request([this](Loaded& slot) {
        const auto& share = shares_[next_];
        const std::size_t k = begin_ + next_round_ * options_.batch_size;
        slot.place = place_;
        slot.place.number += next_round_;
        slot.template request<Sampler::masks>(
            k, k + std::min(options_.batch_size, share.size() - k), share,
            [&](std::size_t draw) { return (*order_)[share.place(draw)]; });
      });
    }
    loads_->publish();
  }
  void advance() {
    if (++next_ != batches_.size()) return;
    next_ = 0;
    ++next_round_;
  }

  void read(std::size_t round, batch_type& own) {
    request_loads();
    std::exception_ptr failure;
    loaded_.assign(batches_.size(), nullptr);
    for (std::size_t i = 0; i != batches_.size(); ++i) {
      if (!has_batch(i, round)) continue;
      try {
        loaded_[i] = &loads_->take();
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    }
    if (failure) {
      tell(round, Failure::of(failure).text(line_.rank()));
      std::rethrow_exception(failure);
    }
    for (const FeedRoute::Hop& hop : line_.route().hops) {
      if (!has_message(hop, round)) continue;
      writer_.clear();
      sizes_.assign(1, batches);
      for (std::size_t i = hop.first; i != hop.first + hop.count; ++i) {
        const std::size_t before = writer_.size();
        if (loaded_[i] != nullptr) writer_.put(loaded_[i]->batch);
        sizes_.push_back(loaded_[i] != nullptr ? writer_.size() - before : no_batch);
      }
      line_.send(sizes_, writer_.written(), hop.to);
    }
    if (loaded_[0] != nullptr) std::swap(own, loaded_[0]->batch);
  }

  void receive(std::size_t round, batch_type& own) {
    sizes_.resize(1 + batches_.size());
    std::span<std::uint8_t> parcels;
    line_.receive(sizes_, [&](std::span<const std::uint64_t> sizes) {
      std::size_t total = 0;
      for (const std::uint64_t size : sizes.subspan(1)) total += size == no_batch ? 0 : size;
      return parcels = room_in(buffer_, total);
    });
    if (sizes_[0] == words) {
      const std::string said(parcels.begin(), parcels.end());
      tell(round, said);
      throw rank_failed("batches", line_.route().reader, said, line_.rank());
    }
    const std::span<const std::uint8_t> mine = parcels.first(has_batch(0, round) ? sizes_[1] : 0);
    std::size_t at = mine.size();
    for (const FeedRoute::Hop& hop : line_.route().hops) {  // in the order of the batches
      if (!has_batch(hop.first, round)) continue;
      const std::uint64_t sizes[] = {batches, sizes_[1 + hop.first]};
      line_.send(sizes, parcels.subspan(at, sizes[1]), hop.to);
      at += sizes[1];
    }
    if (has_batch(0, round)) ParcelReader(mine).take(own);
  }

  /// The ranks that wait for this round's batches get words instead.
  void tell(std::size_t round, const std::string& said) {
    for (const FeedRoute::Hop& hop : line_.route().hops) {
      if (!has_message(hop, round)) continue;
      std::vector<std::uint64_t> sizes(1 + hop.count, no_batch);
      sizes[0] = words;
      sizes[1] = said.size();
      line_.send(sizes, {reinterpret_cast<const std::uint8_t*>(said.data()), said.size()}, hop.to);
    }
  }

  LoaderOptions options_;
  Line& line_;
  Loader loader_;                     ///< of a rank that reads
  std::vector<std::size_t> batches_;  ///< of each carried rank in this loop
  std::vector<decltype(std::declval<const Sampler&>().share_of(Rank{}))> shares_;
  std::size_t begin_ = 0;  ///< the first draw of the loop
  std::size_t rounds_ = 0;
  ParcelWriter writer_;
  std::vector<std::uint8_t> buffer_;
  std::vector<std::uint64_t> sizes_;

  // Of a rank that reads.
  std::optional<decltype(std::declval<const Sampler&>().whole())> order_;
  BatchPlace place_;             ///< of the first round
  std::size_t next_round_ = 0;   ///< of the next batch to request
  std::size_t next_ = 0;         ///< whose it is
  std::vector<Loaded*> loaded_;  ///< batches of the round, by carried rank
  std::optional<PrefetchQueue<Loaded, const Loader>> loads_;
  EndOfScope scope_;
};

/// What `job.open` gives in a job with `Feed<LeaderOfGroup>` or `Feed<ScatterThenBroadcast>`: a
/// data set for `batches`, `evaluate`, `predict` and `fit`.
template <Dataset Source>
class Opened {
 public:
  using batch_type = typename Source::batch_type;

  /// `make()` opens it where this rank `reads`. **Ranks** all. **Host** blocks until all have come.
  template <class Comm, class Make>
  Opened(Comm& comm, bool reads, Make& make) {
    if (reads) source_.emplace(make());
    const std::uint64_t own[] = {reads ? 1u : 0u, reads ? source_->size() : 0u};
    std::vector<std::uint64_t> all(2 * comm.world_size().value());
    comm.all_gather(own, all);
    std::optional<std::size_t> first;
    for (std::size_t r = 0; 2 * r != all.size(); ++r) {
      if (all[2 * r] == 0) continue;
      if (!first) {
        first = r;
        size_ = all[2 * r + 1];
      } else if (all[2 * r + 1] != size_) {
        fail("open",
             {"the data of rank ", *first, " has ", size_, " samples, that of rank ", r, " has ",
              all[2 * r + 1]},
             "let all ranks that read open the same data", comm.rank());
      }
    }
  }

  std::size_t size() const { return size_; }
  /// The data set itself; null where another rank reads.
  const Source* here() const { return source_ ? &*source_ : nullptr; }

  template <class Batch>
    requires Loading<Source, Batch>
  void load(std::span<const std::size_t> indices, Batch& out) const {
    read().load(indices, out);
  }
  template <class Batch>
    requires PassLoading<Source, Batch>
  void load(std::span<const std::size_t> indices, Pass pass, Batch& out) const {
    read().load(indices, pass, out);
  }

 private:
  const Source& read() const {
    if (!source_)
      fail("open", {"this rank has no data to load: another rank reads for it"},
           "let the loops of the job load, or leave Feed out");
    return *source_;
  }

  std::optional<Source> source_;
  std::size_t size_ = 0;
};

}  // namespace lockstep::detail
