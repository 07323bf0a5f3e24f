// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file DataLoader: the batches of an epoch, in order, prefetched by worker threads.

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "lockstep/detail/core/thread.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/sampler.hpp"

namespace lockstep {

/// How a `DataLoader` makes batches.
struct LoaderOptions {
  std::size_t batch_size = 1;
  bool drop_last = false;     ///< leave out an incomplete last batch
  std::size_t workers = 1;    ///< loading threads; 0: the iterating thread loads
  std::size_t prefetch = 2;   ///< batches that each worker loads ahead
  bool timed = false;         ///< measure `waited`
  bool may_be_empty = false;  ///< a data set without samples has no batches instead of an error
};

namespace detail {

/// A ring of slots that worker threads fill; workers claim requests in order. A request that no
/// worker has begun when it is due is filled by the consumer itself, which therefore never waits
/// for a thread to wake up (hence no `TaskQueue`); without workers, that is every request.
/// `batches.fill(slot)` makes a result from the request in a slot; all workers call it, so that it
/// must not use anything that the consumer changes. Atomics count requests, claims and results; the
/// mutex is for sleeping threads only. Spinning before sleeping was measured and gained nothing.
template <class Slot, class Batches>
class PrefetchQueue {
 public:
  PrefetchQueue(std::size_t slots, std::size_t workers, Batches& batches)
      : batches_(batches), slots_(slots) {
    workers_.reserve(workers);
    try {
      for (std::size_t i = 0; i != workers; ++i) {
        // `work` passes exceptions of filling to the consumer, and nothing else throws.
        workers_.emplace_back(
            ThreadName{"lockstep loads", "a worker of a data loader"}, [this] { work(); },
            [](const std::exception_ptr&) {});
      }
    } catch (...) {  // the system has no more threads, and the started ones wait
      stop();
      throw;
    }
  }

  PrefetchQueue(const PrefetchQueue&) = delete;
  PrefetchQueue& operator=(const PrefetchQueue&) = delete;
  ~PrefetchQueue() { stop(); }

  /// Does every slot hold a request? The slot last taken is free again.
  bool full() const { return made_ - taken_ == slots_.size(); }

  /// Should requests be made now? Waking a worker is the most expensive part of a request, so that
  /// workers sleep while all requests are filled and make up more than half of the slots.
  bool is_due() const {
    return made_ - taken_ <= slots_.size() / 2 || !at(made_ - 1).is_filled(made_ - 1);
  }

  /// Writes a request by `describe(slot)` into a free slot. Workers see it after `publish`.
  void request(auto&& describe) {
    describe(at(made_).slot);
    ++made_;
  }

  void publish() {
    const std::size_t before = requests_.exchange(made_, std::memory_order_seq_cst);
    if (before == made_ || sleepers_.load(std::memory_order_seq_cst) == 0) return;
    {
      const std::lock_guard lock(mutex_);
    }  // a worker that saw no request is asleep by now
    if (made_ - before == 1) {
      requested_.notify_one();
    } else {
      requested_.notify_all();
    }
  }

  /// The oldest request, filled. Rethrows the exception of filling it.
  Slot& take() {
    const std::size_t request = taken_++;
    Entry& entry = at(request);
    std::size_t unclaimed = request;
    if (claimed_.compare_exchange_strong(unclaimed, request + 1, std::memory_order_acq_rel)) {
      batches_.fill(entry.slot);
      return entry.slot;
    }
    wait_for(entry, request);
    if (entry.error) std::rethrow_exception(std::exchange(entry.error, nullptr));
    return entry.slot;
  }

  /// Discards all requests, after workers have finished those that they have begun.
  void clear() {
    const std::size_t begun = claimed_.exchange(made_, std::memory_order_acq_rel);
    for (; taken_ < begun; ++taken_) {
      wait_for(at(taken_), taken_);
      at(taken_).error = nullptr;
    }
    taken_ = made_;
  }

 private:
  struct Entry {
    Slot slot;
    std::exception_ptr error;
    std::atomic<std::size_t> filled = 0;  ///< the last filled request + 1

    bool is_filled(std::size_t request) const {
      return filled.load(std::memory_order_seq_cst) == request + 1;
    }
  };

  void stop() {
    const std::lock_guard lock(mutex_);
    stops_ = true;
    requested_.notify_all();
  }

  Entry& at(std::size_t request) { return slots_[request % slots_.size()]; }
  const Entry& at(std::size_t request) const { return slots_[request % slots_.size()]; }

  void wait_for(Entry& entry, std::size_t request) {
    const auto is_filled = [&] { return entry.is_filled(request); };
    if (is_filled()) return;
    std::unique_lock lock(mutex_);
    waits_.store(true, std::memory_order_seq_cst);
    filled_.wait(lock, is_filled);
    waits_.store(false, std::memory_order_relaxed);
  }

  void work() {
    std::size_t request = 0;
    while (claim(request)) {
      Entry& entry = at(request);
      try {
        batches_.fill(entry.slot);
      } catch (...) {
        entry.error = std::current_exception();
      }
      entry.filled.store(request + 1, std::memory_order_seq_cst);
      if (!waits_.load(std::memory_order_seq_cst)) continue;
      {
        const std::lock_guard lock(mutex_);
      }
      filled_.notify_one();
    }
  }

  /// Claims the next request for the calling worker; false if the queue stops.
  bool claim(std::size_t& request) {
    const auto has_more = [this] {
      return stops_.load(std::memory_order_seq_cst) ||
             claimed_.load(std::memory_order_relaxed) != requests_.load(std::memory_order_seq_cst);
    };
    while (true) {
      if (!has_more()) {
        std::unique_lock lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        requested_.wait(lock, has_more);
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
      }
      if (stops_.load(std::memory_order_relaxed)) return false;
      request = claimed_.load(std::memory_order_relaxed);
      while (request != requests_.load(std::memory_order_acquire)) {
        if (claimed_.compare_exchange_weak(request, request + 1, std::memory_order_acq_rel))
          return true;
      }
    }
  }

  Batches& batches_;
  std::vector<Entry> slots_;
  std::size_t made_ = 0;                   ///< requests made, used by the consumer only
  std::size_t taken_ = 0;                  ///< requests taken, used by the consumer only
  std::atomic<std::size_t> requests_ = 0;  ///< requests published to workers
  std::atomic<std::size_t> claimed_ = 0;   ///< requests begun by workers or the consumer
  std::atomic<std::size_t> sleepers_ = 0;  ///< sleeping workers
  std::atomic<bool> waits_ = false;        ///< the consumer sleeps
  std::atomic<bool> stops_ = false;
  std::mutex mutex_;
  std::condition_variable requested_;
  std::condition_variable filled_;
  std::vector<Thread> workers_;  ///< last: the threads use all of the above, and stop first
};

/// A sampler for loaders: the draws of an epoch by number, and a position.
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

/// The number of batches of so many draws. A batch may be larger than the data.
constexpr std::size_t batch_count(std::size_t draws, const LoaderOptions& options) {
  const bool has_rest = !options.drop_last && draws % options.batch_size != 0;
  return draws / options.batch_size + (has_rest ? 1 : 0);
}

LoaderOptions checked_loading(LoaderOptions options, std::size_t samples, std::size_t drawn_from);

/// Where a `DataLoader` gets its batches: the iterating thread requests them by number; a worker or
/// that thread fills them. If `collective`, all ranks request the same, and each must be taken.
template <Dataset Source, Sampling Sampler>
class LocalBatches {
  static_assert(!Sampler::masks || WeightedBatch<typename Source::batch_type>,
                "lockstep: Masked gives duplicates weight 0, and this data set's batches have no "
                "weights; give its batch_type a member `weights`, or choose another remainder");

 public:
  struct Slot {
    std::vector<std::size_t> indices;
    std::vector<float> weights;  ///< if the sampler masks
    Pass pass;
    std::size_t number = 0;  ///< of the batch in its epoch
    typename Source::batch_type batch;
  };
  static constexpr bool collective = false;

  LocalBatches(const Source& dataset, const LoaderOptions& options)
      : dataset_(dataset), options_(options) {}

  std::size_t slots() const { return options_.workers * options_.prefetch + 1; }
  std::size_t workers() const { return options_.workers; }

  /// Begins a loop of so many batches and returns how many are to be requested.
  std::size_t begin(const Sampler& sampler, std::size_t batches) {
    begun_ = sampler.position();
    const SamplerState state = sampler.state();
    pass_ = {state.seed, state.epoch};
    return batches;
  }

  /// Only the iterating thread draws; workers never use the sampler.
  void request(Slot& slot, const Sampler& sampler, std::size_t number) const {
    request(slot, sampler, number, [&](std::size_t k) { return sampler[k]; });
  }
  /// A request for a rank with this share of the draws; `sample(k)` is the sample of its draw k.
  void request(Slot& slot, const auto& share, std::size_t number, const auto& sample) const {
    const std::size_t first = begun_ + number * options_.batch_size;
    const std::size_t end = first + std::min(options_.batch_size, share.size() - first);
    slot.pass = pass_;
    slot.number = begun_ / options_.batch_size + number;
    // The device memory of a batch may depend on its number in the epoch.
    if constexpr (requires { slot.batch.take_turn(number); }) slot.batch.take_turn(slot.number);
    slot.indices.clear();
    slot.weights.clear();
    for (std::size_t k = first; k != end; ++k) {
      slot.indices.push_back(sample(k));
      if constexpr (Sampler::masks) slot.weights.push_back(share.weight(k));
    }
  }

  void fill(Slot& slot) const {
    load_batch(dataset_, slot.indices, slot.pass, slot.number, slot.batch);
    if constexpr (Sampler::masks)
      std::copy(slot.weights.begin(), slot.weights.end(), std::begin(slot.batch.weights));
  }

 private:
  const Source& dataset_;
  LoaderOptions options_;
  std::size_t begun_ = 0;  ///< the loop's first draw
  Pass pass_;
};

/// The source of batches of a data set type; specialised by types that load in another way.
template <class Source, class Sampler>
struct BatchesOf : std::type_identity<LocalBatches<Source, Sampler>> {};

}  // namespace detail

/// `for (const auto& batch : loader)` iterates over an epoch, or the rest of a resumed one. The
/// batches are the same for any number of workers. A batch is valid until the next one; its memory
/// is reused. If loading throws, the loop throws an `Error` that names the sample, with the first
/// exception nested. The data set and the sampler must outlive the loader, which one thread uses.
template <Dataset Source, detail::Sampling Sampler,
          typename Batches = typename detail::BatchesOf<Source, Sampler>::type>
class DataLoader {
 public:
  using batch_type = typename Source::batch_type;

  template <class... More>
  DataLoader(const Source& dataset, Sampler& sampler, LoaderOptions options, More&... more)
      : sampler_(sampler),
        options_(detail::checked_loading(options, dataset.size(), sampler.samples())),
        batches_(dataset, options_, more...),
        queue_(batches_.slots(), batches_.workers(), batches_) {}
  DataLoader(const Source&&, Sampler&,
             LoaderOptions) = delete;  // a temporary would not outlive the loader
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;
  ~DataLoader() {
    if constexpr (Batches::collective) {
      batches_.leave();
      drain();
    }
  }

  /// The batches of an epoch, or of the rest of another world's epoch.
  std::size_t size() const { return detail::batch_count(sampler_.size(), options_); }

  /// How long the loop has waited for batches, if `timed`; without workers, the loading time.
  std::chrono::duration<double> waited() const { return waited_; }

  /// The position of the next batch of the loop; prefetched batches do not count.
  SamplerState state() const { return sampler_.state(); }
  void resume(const SamplerState& state) { sampler_.resume(state); }

  class Iterator {
   public:
    using value_type = batch_type;
    using difference_type = std::ptrdiff_t;

    explicit Iterator(DataLoader& loader) : loader_(&loader), batch_(loader.next()) {}

    const batch_type& operator*() const { return *batch_; }
    const batch_type* operator->() const { return batch_; }
    Iterator& operator++() {
      batch_ = loader_->next();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return batch_ == nullptr; }

   private:
    DataLoader* loader_;
    const batch_type* batch_;
  };

  /// If ranks feed each other: **Ranks** all. **Host** blocks until the first batch is here.
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
  using Slot = typename Batches::Slot;
  using Clock = std::chrono::steady_clock;

  /// The next batch; null at the end of the epoch or after a failure.
  const batch_type* next() {
    const std::size_t left = std::exchange(left_, 0);
    if (left == 0) {
      // This rank may still read for others that have more batches.
      while (Batches::collective && pending_ + unrequested_ != 0) {
        request();
        take();
      }
      return nullptr;
    }
    request();
    Slot& slot = options_.timed ? take_timed() : take();
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
      unrequested_ = 0;  // the loop has ended
      throw;
    }
  }

  /// Reading the clock costs as much as a small batch: after a wait below 2 us, 15 count as equal.
  Slot& take_timed() {
    if (unmeasured_ != 0) {
      --unmeasured_;
      waited_ += latest_;
      return take();
    }
    const Clock::time_point begin = Clock::now();
    Slot& slot = take();
    latest_ = Clock::now() - begin;
    waited_ += latest_;
    unmeasured_ = latest_ < std::chrono::microseconds(2) ? 15 : 0;
    return slot;
  }

  /// Discards requested batches; collective ones must be taken.
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
  std::size_t left_ = 0;         ///< batches of the loop that are not returned yet
  std::size_t unrequested_ = 0;  ///< of the loop
  std::size_t pending_ = 0;      ///< requested and not taken
  std::size_t next_ = 0;         ///< number of the next request
  Clock::duration waited_{};
  Clock::duration latest_{};  ///< last measured wait
  unsigned unmeasured_ = 0;   ///< waits that are assumed equal to it
  Batches batches_;
  detail::PrefetchQueue<Slot, Batches> queue_;  ///< last: its threads use `batches_`
};

template <class Source, class Sampler>
DataLoader(const Source&, Sampler&, LoaderOptions) -> DataLoader<Source, Sampler>;

}  // namespace lockstep
