// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file DataLoader: the batches of an epoch, in order, loaded ahead by worker threads.

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/prefetch_queue.hpp"
#include "lockstep/data/sampler.hpp"

namespace lockstep::detail {

/// Takes batches by the loader's `next()`, which returns null at their end.
template <class Loader>
class BatchIterator {
 public:
  using value_type = typename Loader::batch_type;
  using difference_type = std::ptrdiff_t;

  explicit BatchIterator(Loader& loader) : loader_(&loader), batch_(loader.next()) {}

  const value_type& operator*() const { return *batch_; }
  const value_type* operator->() const { return batch_; }
  BatchIterator& operator++() {
    batch_ = loader_->next();
    return *this;
  }
  void operator++(int) { ++*this; }
  bool operator==(std::default_sentinel_t) const { return batch_ == nullptr; }

 private:
  Loader* loader_;
  const value_type* batch_;
};

/// Reading the clock takes as long as loading a small batch. So after a short wait the next fifteen
/// are not measured but taken to be as long; long waits are measured one by one.
class WaitMeter {
 public:
  using Clock = std::chrono::steady_clock;

  /// Calls `f`, for which the loop waits, and returns its result.
  template <class F>
  decltype(auto) measure(F&& f) {
    if (unmeasured_ != 0) {
      --unmeasured_;
      total_ += latest_;
      return f();
    }
    const Stop stop{*this, Clock::now()};
    return f();
  }

  std::chrono::duration<double> total() const { return total_; }

 private:
  struct Stop {
    WaitMeter& meter;
    Clock::time_point begin;
    ~Stop() { meter.add(Clock::now() - begin); }
  };

  void add(Clock::duration wait) {
    total_ += wait;
    latest_ = wait;
    unmeasured_ = wait < std::chrono::microseconds(2) ? 15 : 0;
  }

  Clock::duration total_{};
  Clock::duration latest_{};
  unsigned unmeasured_ = 0;
};

}  // namespace lockstep::detail

namespace lockstep {

namespace detail {

/// A sampler that a loader can use: it gives the draws of an epoch by number, and has a position.
template <class S>
concept Sampling = requires(S& sampler, const S& sampled, SamplerState state, std::size_t k) {
  { S::masks } -> std::convertible_to<bool>;
  { sampled.samples() } -> std::convertible_to<std::size_t>;
  { sampled.size() } -> std::convertible_to<std::size_t>;
  { sampled.position() } -> std::convertible_to<std::size_t>;
  { sampled[k] } -> std::convertible_to<std::size_t>;
  { sampled.weight(k) } -> std::convertible_to<float>;
  { sampled.state() } -> std::same_as<SamplerState>;
  sampler.resume(state);
  sampler.start();
  sampler.advance(k);
};

static_assert(Sampling<DistributedSampler<>>);

}  // namespace detail

/// How a `DataLoader` makes batches.
struct LoaderOptions {
  std::size_t batch_size = 1;
  bool drop_last = false;     ///< leave out a last batch that is not full
  std::size_t workers = 1;    ///< threads that load; 0: the iterating thread loads
  std::size_t prefetch = 2;   ///< batches that each worker loads ahead
  bool timed = false;         ///< measure how long the loop waits: `waited`
  bool may_be_empty = false;  ///< a data set without samples has no batches, and is no error
};

namespace detail {

/// How many batches so many draws make. A batch may be larger than the data: then there is one.
constexpr std::size_t batch_count(std::size_t draws, const LoaderOptions& options) {
  const bool has_rest = !options.drop_last && draws % options.batch_size != 0;
  return draws / options.batch_size + (has_rest ? 1 : 0);
}

/// The options, if a loader can follow them with a data set of `samples` and a sampler that draws
/// from `drawn_from`.
inline LoaderOptions checked_loading(LoaderOptions options, std::size_t samples,
                                     std::size_t drawn_from) {
  if (options.batch_size == 0)
    fail("DataLoader", {"batches of no samples"}, "set batch_size to 1 or more");
  if (samples == 0 && !options.may_be_empty)
    fail("DataLoader", {"the data set has no samples"}, "check what it was made from");
  if (options.workers != 0 && options.prefetch == 0)
    fail("DataLoader", {"workers that load nothing ahead"},
         "set prefetch to 1 or more, or workers to 0");
  if (drawn_from != samples)
    fail("DataLoader",
         {"the sampler draws from ", drawn_from, " samples and the data set has ", samples},
         "make the sampler with the size of this data set");
  return options;
}

}  // namespace detail

/// `for (const auto& batch : loader)` is an epoch, or what is left of a resumed one. The batches
/// are the same for any number of workers. A batch is valid until the next; its memory is reused.
/// What loading a batch throws is thrown in place of the batch, as an `Error` that names the sample
/// and in which the first exception is nested. Data set and sampler must outlive the loader; one
/// thread iterates.
template <Dataset Source, detail::Sampling Sampler>
class DataLoader {
 public:
  using batch_type = typename Source::batch_type;
  static_assert(!Sampler::masks || WeightedBatch<batch_type>,
                "lockstep: Masked gives duplicates weight 0, and this data set's batches have no "
                "weights; give its batch_type a member `weights`, or choose another remainder");

  DataLoader(const Source& dataset, Sampler& sampler, LoaderOptions options)
      : sampler_(sampler),
        options_(detail::checked_loading(options, dataset.size(), sampler.samples())),
        queue_(options.workers * options.prefetch + 1, options.workers, Load{&dataset}) {}

  DataLoader(const Source&&, Sampler&,
             LoaderOptions) = delete;  // it would be gone by the first batch

  /// How many batches an epoch has; where another world has begun it, what was left then.
  std::size_t size() const { return batches(sampler_.size()); }

  /// How long the loop has waited for batches, where the options say `timed`: all of loading where
  /// the iterating thread loads, else what workers were late.
  std::chrono::duration<double> waited() const { return waits_.total(); }

  /// The position of the next batch that the loop gets; batches loaded ahead do not count.
  SamplerState state() const { return sampler_.state(); }
  void resume(const SamplerState& state) { sampler_.resume(state); }

  using Iterator = detail::BatchIterator<DataLoader>;

  Iterator begin() {
    queue_.clear();
    sampler_.start();
    requested_ = sampler_.position();
    left_ = unrequested_ = batches(sampler_.size() - requested_);
    const SamplerState state = sampler_.state();
    place_ = {{state.seed, state.epoch}, requested_ / options_.batch_size};
    return Iterator(*this);
  }
  std::default_sentinel_t end() const { return {}; }

 private:
  friend Iterator;

  struct Slot {
    std::vector<std::size_t> indices;
    std::vector<float> weights;
    detail::BatchPlace place;
    batch_type batch;
  };

  /// Is a batch told its number in the epoch, because where it is copied to depends on that?
  static constexpr bool takes_turns = requires(batch_type& batch) { batch.take_turn(0); };

  struct Load {
    const Source* dataset;
    void operator()(Slot& slot) const {
      detail::load_batch(*dataset, slot.indices, slot.place, slot.batch);
      if constexpr (Sampler::masks)
        std::copy(slot.weights.begin(), slot.weights.end(), std::begin(slot.batch.weights));
    }
  };

  std::size_t batches(std::size_t draws) const { return detail::batch_count(draws, options_); }

  /// The next batch; null at the end of the epoch or after a failure.
  const batch_type* next() {
    if (left_ == 0) return nullptr;
    if (queue_.is_due()) {
      for (; unrequested_ != 0 && !queue_.full(); --unrequested_) request();
      queue_.publish();
    }
    const std::size_t left = std::exchange(left_, 0);
    Slot& slot = options_.timed ? waits_.measure([this]() -> Slot& { return queue_.take(); })
                                : queue_.take();
    left_ = left - 1;
    sampler_.advance(slot.indices.size());
    return &slot.batch;
  }

  /// Draws are made only here, on the iterating thread: workers never use the sampler.
  void request() {
    queue_.request([this](Slot& slot) {
      const std::size_t end =
          requested_ + std::min(options_.batch_size, sampler_.size() - requested_);
      slot.place = place_;
      ++place_.number;
      if constexpr (takes_turns) slot.batch.take_turn(slot.place.number);
      slot.indices.clear();
      slot.weights.clear();
      for (; requested_ != end; ++requested_) {
        slot.indices.push_back(sampler_[requested_]);
        if constexpr (Sampler::masks) slot.weights.push_back(sampler_.weight(requested_));
      }
    });
  }

  Sampler& sampler_;
  LoaderOptions options_;
  detail::BatchPlace place_;     ///< of the next batch to request
  std::size_t requested_ = 0;    ///< draws of the epoch that are in the queue or over
  std::size_t unrequested_ = 0;  ///< batches not in the queue yet
  std::size_t left_ = 0;         ///< batches not given out yet
  detail::WaitMeter waits_;
  detail::LoadQueue<Slot, Load> queue_;
};

namespace detail {

/// The loader of a kind of data set, made of the data set, a sampler and options. Data sets that
/// bring their batches another way specialise this in their header.
template <class Source, class Sampler>
struct LoaderOf : std::type_identity<DataLoader<Source, Sampler>> {};
template <class Source, class Sampler>
using LoaderFor = typename LoaderOf<Source, Sampler>::type;

}  // namespace detail

}  // namespace lockstep
