// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A ring of buffers that worker threads fill with batches and one consumer empties in order.

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "lockstep/core/thread.hpp"

namespace lockstep::detail {

/// Workers claim requests in the order in which they were made; a batch that is filled before its
/// turn waits in its slot. Slots, and all memory in them, are used again. Without workers the
/// consumer fills a slot when it takes it.
///
/// A `Slot` holds a request and its answer. `Fill` makes the answer from the request; all workers
/// call it, and it must not use anything that the consumer changes.
template <class Slot, class Fill>
class LoadQueue {
 public:
  LoadQueue(std::size_t slots, std::size_t workers, Fill fill)
      : fill_(std::move(fill)), slots_(slots) {
    workers_.reserve(workers);
    for (std::size_t i = 0; i != workers; ++i) {
      // The consumer gets the exceptions of filling a slot, and nothing else throws.
      workers_.emplace_back("lockstep loads", [this] { work(); }, [](const std::exception_ptr&) {});
    }
  }

  LoadQueue(const LoadQueue&) = delete;
  LoadQueue& operator=(const LoadQueue&) = delete;
  ~LoadQueue() {
    const std::lock_guard lock(mutex_);
    stops_ = true;
    requested_.notify_all();
  }

  /// Whether every slot holds a request. The slot last taken is free again.
  bool full() const { return requests_ - taken_ == slots_.size(); }

  /// Makes a request: `describe(slot)` writes it into a free slot, which may be the one last taken.
  void request(auto&& describe) {
    Entry& entry = at(requests_);
    describe(entry.slot);
    const std::lock_guard lock(mutex_);
    entry.ready = false;
    ++requests_;
    requested_.notify_one();
  }

  /// The oldest request, filled. Throws the exception of filling it, if there was one.
  Slot& take() {
    Entry& entry = at(taken_);
    if (workers_.empty()) {
      ++taken_;
      fill_(entry.slot);
      return entry.slot;
    }
    std::unique_lock lock(mutex_);
    filled_.wait(lock, [&] { return entry.ready; });
    ++taken_;
    if (entry.error) std::rethrow_exception(std::exchange(entry.error, nullptr));
    return entry.slot;
  }

  /// Forgets all requests, after workers have finished those that they have begun.
  void clear() {
    std::unique_lock lock(mutex_);
    claimed_ = requests_;
    filled_.wait(lock, [&] { return busy_ == 0; });
    requests_ = claimed_ = taken_ = 0;
  }

 private:
  struct Entry {
    Slot slot;
    std::exception_ptr error;
    bool ready = false;
  };

  Entry& at(std::size_t request) { return slots_[request % slots_.size()]; }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      requested_.wait(lock, [&] { return stops_ || claimed_ != requests_; });
      if (stops_) return;
      Entry& entry = at(claimed_++);
      ++busy_;
      lock.unlock();
      std::exception_ptr error;
      try {
        fill_(entry.slot);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      --busy_;
      entry.error = std::move(error);
      entry.ready = true;
      filled_.notify_one();
    }
  }

  Fill fill_;
  std::vector<Entry> slots_;
  std::mutex mutex_;
  std::condition_variable requested_;
  std::condition_variable filled_;
  std::size_t requests_ = 0;  ///< made so far; written by the consumer
  std::size_t taken_ = 0;     ///< given to the consumer; its own
  std::size_t claimed_ = 0;   ///< begun by workers
  std::size_t busy_ = 0;      ///< workers that are filling a slot
  bool stops_ = false;
  std::vector<Thread> workers_;  ///< last: they use all of the above, and stop first
};

}  // namespace lockstep::detail
