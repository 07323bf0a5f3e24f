// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file DataLoader: the batches of an epoch, in order, made ahead by the threads of a source of
/// batches.

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
LoaderOptions checked_loading(LoaderOptions options, std::size_t samples, std::size_t drawn_from);

/// A request for a batch of some samples, and the batch. Slots are used again, with their memory.
template <class Batch>
struct LoadSlot {
  std::vector<std::size_t> indices;
  std::vector<float> weights;  ///< where the sampler masks
  BatchPlace place;
  Batch batch;

  /// Asks for draws [first, end) of a sampler or a share; `sample(k)` is the sample of draw k.
  template <bool Masks, class Sample>
  void request(std::size_t first, std::size_t end, const auto& share, const Sample& sample) {
    indices.clear();
    weights.clear();
    for (std::size_t k = first; k != end; ++k) {
      indices.push_back(sample(k));
      if constexpr (Masks) weights.push_back(share.weight(k));
    }
  }
};

/// Fills slots from a data set: what workers call.
template <Dataset Source, Sampling Sampler>
struct LoadsSlots {
  using batch_type = typename Source::batch_type;
  static_assert(!Sampler::masks || WeightedBatch<batch_type>,
                "lockstep: Masked gives duplicates weight 0, and this data set's batches have no "
                "weights; give its batch_type a member `weights`, or choose another remainder");

  void operator()(LoadSlot<batch_type>& slot) const {
    load_batch(*dataset, slot.indices, slot.place, slot.batch);
    if constexpr (Sampler::masks)
      std::copy(slot.weights.begin(), slot.weights.end(), std::begin(slot.batch.weights));
  }

  const Source* dataset;
};

/// Where a `DataLoader` has its batches from. The iterating thread begins loops and requests
/// batches, by their number in the loop; a worker, or that thread itself, fills them. Where
/// `collective` is true, all ranks request the same, and what was requested must be taken.
template <class B, class Sampler>
concept BatchSource = requires(B& batches, const B& made, Sampler& sampler, typename B::Slot& slot,
                               std::size_t number) {
  { B::collective } -> std::convertible_to<bool>;
  { made.slots() } -> std::convertible_to<std::size_t>;
  { made.workers() } -> std::convertible_to<std::size_t>;
  /// Of a loop that gives `number` batches; returns how many are requested.
  { batches.begin(sampler, number) } -> std::convertible_to<std::size_t>;
  batches.request(slot, sampler, number);
  batches.fill(slot);
  slot.batch;
};

/// The batches that a rank loads for itself.
template <Dataset Source, Sampling Sampler>
class LocalBatches {
 public:
  using Slot = LoadSlot<typename Source::batch_type>;
  static constexpr bool collective = false;

  LocalBatches(const Source& dataset, const LoaderOptions& options)
      : load_{&dataset}, options_(options) {}

  std::size_t slots() const { return options_.workers * options_.prefetch + 1; }
  std::size_t workers() const { return options_.workers; }

  std::size_t begin(const Sampler& sampler, std::size_t batches) {
    begun_ = sampler.position();
    const SamplerState state = sampler.state();
    first_ = {{state.seed, state.epoch}, begun_ / options_.batch_size};
    return batches;
  }

  /// Draws are made only here, on the iterating thread: workers never use the sampler.
  void request(Slot& slot, const Sampler& sampler, std::size_t number) const {
    const std::size_t first = begun_ + number * options_.batch_size;
    slot.place = first_;
    slot.place.number += number;
    // Where a batch is copied to may depend on its number in the epoch.
    if constexpr (requires { slot.batch.take_turn(number); })
      slot.batch.take_turn(slot.place.number);
    slot.template request<Sampler::masks>(
        first, first + std::min(options_.batch_size, sampler.size() - first), sampler,
        [&](std::size_t k) { return sampler[k]; });
  }

  void fill(Slot& slot) const { load_(slot); }

 private:
  LoadsSlots<Source, Sampler> load_;
  LoaderOptions options_;
  std::size_t begun_ = 0;  ///< the draw at which the loop began
  BatchPlace first_;       ///< of the loop's first batch
};

/// The source of batches of a kind of data set. Data sets that bring their batches another way
/// specialise this in their header.
template <class Source, class Sampler>
struct BatchesOf : std::type_identity<LocalBatches<Source, Sampler>> {};

}  // namespace detail

/// `for (const auto& batch : loader)` is an epoch, or what is left of a resumed one. The batches
/// are the same for any number of workers. A batch is valid until the next; its memory is reused.
/// What loading a batch throws is thrown in place of the batch, as an `Error` that names the sample
/// and in which the first exception is nested. Data set and sampler must outlive the loader; one
/// thread iterates.
template <Dataset Source, detail::Sampling Sampler,
          detail::BatchSource<Sampler> Batches = typename detail::BatchesOf<Source, Sampler>::type>
class DataLoader {
 public:
  using batch_type = typename Source::batch_type;

  /// `more` is what the source of batches needs beside the data set.
  template <class... More>
  DataLoader(const Source& dataset, Sampler& sampler, LoaderOptions options, More&... more)
      : sampler_(sampler),
        options_(detail::checked_loading(options, dataset.size(), sampler.samples())),
        batches_(dataset, options_, more...),
        queue_(batches_.slots(), batches_.workers(), Fill{&batches_}) {}
  DataLoader(const Source&&, Sampler&,
             LoaderOptions) = delete;  // it would be gone by the first batch
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;
  ~DataLoader() {
    if constexpr (Batches::collective) {
      batches_.leave();
      drain();
    }
  }

  /// How many batches an epoch has; where another world has begun it, what was left then.
  std::size_t size() const { return detail::batch_count(sampler_.size(), options_); }

  /// How long the loop has waited for batches, where the options say `timed`: all of loading where
  /// the iterating thread loads, else what workers were late.
  std::chrono::duration<double> waited() const { return waits_.total(); }

  /// The position of the next batch that the loop gets; batches loaded ahead do not count.
  SamplerState state() const { return sampler_.state(); }
  void resume(const SamplerState& state) { sampler_.resume(state); }

  using Iterator = detail::BatchIterator<DataLoader>;

  /// Where ranks feed each other: **Ranks** all. **Host** blocks until the first batch is here.
  Iterator begin() {
    drain();
    sampler_.start();
    left_ = detail::batch_count(sampler_.size() - sampler_.position(), options_);
    unrequested_ = batches_.begin(sampler_, left_);
    next_ = 0;
    return Iterator(*this);
  }
  std::default_sentinel_t end() const { return {}; }

 private:
  friend Iterator;
  using Slot = typename Batches::Slot;

  struct Fill {
    Batches* batches;
    void operator()(Slot& slot) const { batches->fill(slot); }
  };

  /// The next batch; null at the end of the epoch or after a failure.
  const batch_type* next() {
    const std::size_t left = std::exchange(left_, 0);
    if (left == 0) {
      // This rank may read for others that have more batches.
      while (Batches::collective && pending_ + unrequested_ != 0) {
        request();
        take();
      }
      return nullptr;
    }
    request();
    Slot& slot = options_.timed ? waits_.measure([this]() -> Slot& { return take(); }) : take();
    left_ = left - 1;
    sampler_.advance(std::min(options_.batch_size, sampler_.size() - sampler_.position()));
    return &slot.batch;
  }

  void request() {
    if (!Batches::collective && !queue_.is_due()) return;
    for (; unrequested_ != 0 && !queue_.full(); --unrequested_, ++pending_)
      queue_.request([this](Slot& slot) { batches_.request(slot, sampler_, next_++); });
    queue_.publish();
  }

  Slot& take() {
    --pending_;
    try {
      return queue_.take();
    } catch (...) {
      unrequested_ = 0;  // the loop is over
      throw;
    }
  }

  /// What was requested and is not wanted.
  void drain() noexcept {
    unrequested_ = 0;
    if constexpr (Batches::collective) {
      while (pending_ != 0) {
        try {
          take();
        } catch (...) {  // NOLINT(bugprone-empty-catch): the next call of this rank fails likewise
        }
      }
    } else {
      queue_.clear();
      pending_ = 0;
    }
  }

  Sampler& sampler_;
  LoaderOptions options_;
  std::size_t left_ = 0;         ///< batches not given out yet
  std::size_t unrequested_ = 0;  ///< of the loop
  std::size_t pending_ = 0;      ///< requested and not taken
  std::size_t next_ = 0;         ///< the number of the next request
  detail::WaitMeter waits_;
  Batches batches_;
  detail::PrefetchQueue<Slot, Fill> queue_;  ///< its threads use the batches
};

template <class Source, class Sampler>
DataLoader(const Source&, Sampler&, LoaderOptions) -> DataLoader<Source, Sampler>;

}  // namespace lockstep
