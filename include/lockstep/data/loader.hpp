// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file DataLoader: the batches of an epoch, in order, which the threads of a ring of buffers make
/// ahead from a source of batches.

#include <atomic>
#include <condition_variable>
#include <exception>
#include <iterator>
#include <mutex>

#include "lockstep/core/error.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/sampler.hpp"

namespace lockstep {

namespace detail {

/// Workers claim requests in the order in which they were made; a batch that is filled before its
/// turn waits in its slot. Slots, and all memory in them, are used again and never move. A request
/// that no worker has begun when it is due is filled by the consumer itself, which so never waits
/// for a thread to wake up; without workers that is every request.
///
/// A `Slot` holds a request and its answer. `batches.fill(slot)` makes the answer from the request;
/// all workers call it, and it must not use anything that the consumer changes. The threads are the
/// queue's own, not tasks of a `TaskQueue`: several claim from one ring, and a consumer that is
/// early takes a request back from them.
///
/// Requests, claims and answers are counted by atomics; the lock is for those who sleep. Looking
/// for a few microseconds before sleeping was measured, and gained nothing.
template <class Slot, class Batches>
class PrefetchQueue {
 public:
  PrefetchQueue(std::size_t slots, std::size_t workers, Batches& batches)
      : batches_(batches), slots_(slots) {
    workers_.reserve(workers);
    try {
      for (std::size_t i = 0; i != workers; ++i) {
        // The consumer gets the exceptions of filling a slot, and nothing else throws.
        workers_.emplace_back(
            ThreadName{"lockstep loads", "a worker of a data loader"}, [this] { work(); },
            [](const std::exception_ptr&) {});
      }
    } catch (...) {  // the system has no more threads, and those that were started wait
      stop();
      throw;
    }
  }

  PrefetchQueue(const PrefetchQueue&) = delete;
  PrefetchQueue& operator=(const PrefetchQueue&) = delete;
  ~PrefetchQueue() { stop(); }

  /// Whether every slot holds a request. The slot last taken is free again.
  bool full() const { return made_ - taken_ == slots_.size(); }

  /// Whether requests should be made now. To wake a worker is the dearest part of a request, so
  /// while all that was requested is filled, and at least half of the slots are, workers sleep on.
  bool is_due() const {
    return made_ - taken_ <= slots_.size() / 2 || !at(made_ - 1).is_filled(made_ - 1);
  }

  /// Writes a request by `describe(slot)` into a free slot, which may be the one last taken.
  /// Workers see it after `publish`.
  void request(auto&& describe) {
    describe(at(made_).slot);
    ++made_;
  }

  /// Lets workers begin the requests that were made.
  void publish() {
    const std::size_t before = requests_.exchange(made_, std::memory_order_seq_cst);
    if (before == made_ || sleepers_.load(std::memory_order_seq_cst) == 0) return;
    {
      const std::lock_guard lock(mutex_);
    }  // whoever has seen nothing to do is asleep by now
    if (made_ - before == 1) {
      requested_.notify_one();
    } else {
      requested_.notify_all();
    }
  }

  /// The oldest request, filled. Throws the exception of filling it, if there was one.
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

  /// Forgets all requests, after workers have finished those that they have begun.
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
    std::atomic<std::size_t> filled = 0;  ///< one more than the last request that is filled

    bool is_filled(std::size_t request) const {
      return filled.load(std::memory_order_seq_cst) == request + 1;
    }
  };

  /// Lets the workers end.
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

  /// Gives the next request to the calling worker; false if there will be none.
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
  std::size_t made_ = 0;   ///< requests that the consumer has made; its own
  std::size_t taken_ = 0;  ///< requests that the consumer has the answers of; its own
  std::atomic<std::size_t> requests_ = 0;  ///< of those made, how many workers may begin
  std::atomic<std::size_t> claimed_ = 0;   ///< begun, by workers or the consumer
  std::atomic<std::size_t> sleepers_ = 0;  ///< workers that sleep
  std::atomic<bool> waits_ = false;        ///< the consumer sleeps
  std::atomic<bool> stops_ = false;
  std::mutex mutex_;
  std::condition_variable requested_;
  std::condition_variable filled_;
  std::vector<Thread> workers_;  ///< last: they use all of the above, and stop first
};

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
  static_assert(!Sampler::masks || WeightedBatch<typename Source::batch_type>,
                "lockstep: Masked gives duplicates weight 0, and this data set's batches have no "
                "weights; give its batch_type a member `weights`, or choose another remainder");

 public:
  /// A request for a batch of some samples, and the batch. Slots are used again, with their memory.
  struct Slot {
    std::vector<std::size_t> indices;
    std::vector<float> weights;  ///< where the sampler masks
    BatchPlace place;
    typename Source::batch_type batch;
  };
  static constexpr bool collective = false;

  LocalBatches(const Source& dataset, const LoaderOptions& options)
      : dataset_(dataset), options_(options) {}

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
    request(slot, sampler, number, [&](std::size_t k) { return sampler[k]; });
  }
  /// The same for a rank with this share of the sampler's draws; `sample(k)` is that of its draw k.
  void request(Slot& slot, const auto& share, std::size_t number, const auto& sample) const {
    const std::size_t first = begun_ + number * options_.batch_size;
    const std::size_t end = first + std::min(options_.batch_size, share.size() - first);
    slot.place = first_;
    slot.place.number += number;
    // Where a batch is copied to may depend on its number in the epoch.
    if constexpr (requires { slot.batch.take_turn(number); })
      slot.batch.take_turn(slot.place.number);
    slot.indices.clear();
    slot.weights.clear();
    for (std::size_t k = first; k != end; ++k) {
      slot.indices.push_back(sample(k));
      if constexpr (Sampler::masks) slot.weights.push_back(share.weight(k));
    }
  }

  void fill(Slot& slot) const {
    load_batch(dataset_, slot.indices, slot.place, slot.batch);
    if constexpr (Sampler::masks)
      std::copy(slot.weights.begin(), slot.weights.end(), std::begin(slot.batch.weights));
  }

 private:
  const Source& dataset_;
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
        queue_(batches_.slots(), batches_.workers(), batches_) {}
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
  std::chrono::duration<double> waited() const { return waited_; }

  /// The position of the next batch that the loop gets; batches loaded ahead do not count.
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
  using Slot = typename Batches::Slot;
  using Clock = std::chrono::steady_clock;

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
      unrequested_ = 0;  // the loop is over
      throw;
    }
  }

  /// Reading the clock takes as long as loading a small batch. So after a short wait the next
  /// fifteen are not measured but taken to be as long; long waits are measured one by one.
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
  Clock::duration waited_{};
  Clock::duration latest_{};  ///< wait that was measured
  unsigned unmeasured_ = 0;   ///< waits that will not be
  Batches batches_;
  detail::PrefetchQueue<Slot, Batches> queue_;  ///< its threads use the batches
};

template <class Source, class Sampler>
DataLoader(const Source&, Sampler&, LoaderOptions) -> DataLoader<Source, Sampler>;

}  // namespace lockstep
