// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A ring of buffers that worker threads fill with batches and one consumer empties in order.

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "lockstep/core/thread.hpp"

namespace lockstep::detail {

/// Workers claim requests in the order in which they were made; a batch that is filled before its
/// turn waits in its slot. Slots, and all memory in them, are used again and never move. A request
/// that no worker has begun when it is due is filled by the consumer itself, which so never waits
/// for a thread to wake up; without workers that is every request.
///
/// A `Slot` holds a request and its answer. `Fill` makes the answer from the request; all workers
/// call it, and it must not use anything that the consumer changes.
///
/// Requests, claims and answers are counted by atomics; the lock is for those who sleep. Looking
/// for a few microseconds before sleeping was measured, and gained nothing.
template <class Slot, class Fill>
class PrefetchQueue {
 public:
  PrefetchQueue(std::size_t slots, std::size_t workers, Fill fill)
      : fill_(std::move(fill)), slots_(slots) {
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
      fill_(entry.slot);
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
        fill_(entry.slot);
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

  Fill fill_;
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

}  // namespace lockstep::detail
