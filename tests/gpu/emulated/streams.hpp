// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Streams, events and graphs of emulated GPUs. Streams run as fast as they like, within what
/// their events allow; a graph's nodes run in any order that their edges allow.

#include <cuda_runtime_api.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/emulated/device.hpp"

namespace emulated {

/// What a graph does, and after which of its nodes.
struct Node {
  std::function<void()> work;
  int gpu = 0;
  std::vector<std::size_t> after;
};

/// A graph in the making.
struct Capture {
  std::vector<Node> nodes;
  std::vector<cudaStream_t> streams;  // the first began it
  std::thread::id thread;
  bool is_relaxed = false;
  bool is_invalid = false;
};

/// Takes all of `more` that `all` lacks.
inline void add(std::vector<std::size_t>& all, const std::vector<std::size_t>& more) {
  for (const std::size_t one : more)
    if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
}

}  // namespace emulated

struct CUevent_st {
  int gpu = 0;
  std::atomic<bool> is_destroyed = false;
  std::uint64_t recorded = 0;                  // how often
  std::uint64_t reached = 0;                   // which record
  std::chrono::steady_clock::time_point time;  // when it was reached
  std::vector<cudaStream_t> waiting;           // streams to be woken then
  std::shared_ptr<emulated::Capture> capture;  // where it was recorded last, if that was a capture
  std::vector<std::size_t> tails;              // its nodes that it stands for
};

struct CUstream_st {
  struct Item {
    std::function<void()> work;
    cudaEvent_t wait = nullptr;    // for this record of it
    cudaEvent_t record = nullptr;  // as this one
    std::uint64_t number = 0;
    std::function<bool()> is_ready = nullptr;  // for work that waits for something else
  };
  int gpu = 0;
  bool is_default = false;
  std::deque<Item> items;  // the first may be under way
  std::uint64_t enqueued = 0;
  std::uint64_t finished = 0;
  bool is_ending = false;
  std::condition_variable changed;
  std::shared_ptr<emulated::Capture> capture;
  std::vector<std::size_t> tails;  // its nodes that the next one comes after
  std::thread thread;
};

struct CUgraph_st {
  std::vector<emulated::Node> nodes;
};
struct CUgraphExec_st {
  std::shared_ptr<const std::vector<emulated::Node>> nodes;
};

namespace emulated {

/// The streams and events of a process, each stream with a thread. It is never ended: events that
/// are gone may still be waited for.
class Gpu {
 public:
  using Item = CUstream_st::Item;

  static Gpu& get() { return *instance(); }

  // ---- Streams

  cudaStream_t make_stream(bool is_default = false) {
    auto* const stream = new CUstream_st;
    stream->gpu = current_gpu;
    stream->is_default = is_default;
    const std::lock_guard lock(mutex_);
    streams_.insert(stream);
    stream->thread = std::thread([this, stream] { run(*stream); });
    return stream;
  }
  void end_stream(cudaStream_t stream) {
    {
      const std::lock_guard lock(mutex_);
      stream->is_ending = true;
      stream->changed.notify_all();
    }
    stream->thread.join();
    {
      const std::lock_guard lock(mutex_);
      streams_.erase(stream);
      finished_.notify_all();
    }
    delete stream;
  }
  /// Every GPU has a default stream, which its first use makes.
  cudaStream_t stream_or_default(cudaStream_t stream) {
    if (stream != nullptr) return stream;
    const std::lock_guard lock(defaults_mutex_);
    cudaStream_t& made = defaults_[static_cast<std::size_t>(current_gpu)];
    if (made == nullptr) made = make_stream(true);
    return made;
  }
  /// A test has ended: a process that forks must have no threads.
  void end_default_streams() {
    const std::lock_guard lock(defaults_mutex_);
    for (cudaStream_t& stream : defaults_)
      if (stream != nullptr) end_stream(std::exchange(stream, nullptr));
  }

  /// Adds to what the stream is to do, or to the graph that is made of it.
  cudaError_t enqueue(cudaStream_t stream, Item item) {
    stream = stream_or_default(stream);
    const std::lock_guard lock(mutex_);
    if (item.wait != nullptr && item.wait->capture) return wait_captured(*stream, *item.wait);
    if (stream->capture) return add_to_capture(*stream, std::move(item));
    if (item.record != nullptr) {
      item.record->capture.reset();
      item.number = ++item.record->recorded;
    }
    if (item.wait != nullptr) {
      item.number = item.wait->recorded;
      if (stream->items.empty() && item.wait->reached >= item.number) return cudaSuccess;
    }
    if (stream->items.empty() && item.record != nullptr && !item.work) {
      reach(*item.record, item.number);
      return cudaSuccess;
    }
    ++stream->enqueued;
    stream->items.push_back(std::move(item));
    if (stream->items.size() == 1) stream->changed.notify_all();
    return cudaSuccess;
  }

  /// Something has changed for which the work of a stream may wait.
  void wake() {
    const std::lock_guard lock(mutex_);
    for (cudaStream_t stream : streams_) stream->changed.notify_all();
  }

  cudaError_t synchronize(cudaStream_t stream) {
    if (stream == nullptr && is_capturing_here()) {
      return fail(cudaErrorStreamCaptureImplicit, "the default stream is used in a capture");
    }
    stream = stream_or_default(stream);
    std::unique_lock lock(mutex_);
    if (stream->capture) return invalidate(*stream);
    const std::uint64_t last = stream->enqueued;
    finished_.wait(lock, [&] { return stream->finished >= last; });
    return cudaSuccess;
  }
  cudaError_t query(cudaStream_t stream) {
    stream = stream_or_default(stream);
    const std::lock_guard lock(mutex_);
    if (stream->capture) return invalidate(*stream);
    return stream->items.empty() ? cudaSuccess : cudaErrorNotReady;
  }

  /// Waits for all streams of GPUs for which `concerns(gpu)` holds. False if that takes too long.
  template <class Concerns>
  bool drain(const Concerns& concerns, std::chrono::milliseconds most) {
    std::unique_lock lock(mutex_);
    std::vector<std::pair<cudaStream_t, std::uint64_t>> pending;
    for (cudaStream_t stream : streams_)
      if (concerns(stream->gpu)) pending.emplace_back(stream, stream->enqueued);
    return finished_.wait_for(lock, most, [&] {
      return std::all_of(pending.begin(), pending.end(), [&](const auto& one) {
        return !streams_.contains(one.first) || one.first->finished >= one.second;
      });
    });
  }

  // ---- Events

  cudaEvent_t make_event() {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::make_unique<CUevent_st>());
    events_.back()->gpu = current_gpu;
    return events_.back().get();
  }
  void end_event(cudaEvent_t event) {
    const std::lock_guard lock(mutex_);
    event->is_destroyed = true;
  }
  cudaError_t query(cudaEvent_t event) {
    const std::lock_guard lock(mutex_);
    if (event->capture) return fail(cudaErrorCapturedEvent, "the event is part of a capture");
    return event->reached == event->recorded ? cudaSuccess : cudaErrorNotReady;
  }
  cudaError_t synchronize(cudaEvent_t event) {
    std::unique_lock lock(mutex_);
    if (event->capture) return fail(cudaErrorCapturedEvent, "the event is part of a capture");
    const std::uint64_t last = event->recorded;
    finished_.wait(lock, [&] { return event->reached >= last; });
    return cudaSuccess;
  }

  // ---- Graphs

  cudaError_t begin_capture(cudaStream_t stream, bool is_relaxed) {
    const std::lock_guard lock(mutex_);
    if (stream == nullptr || stream->is_default || stream->capture)
      return fail(cudaErrorIllegalState, "this stream cannot be captured");
    stream->capture = std::make_shared<Capture>();
    stream->capture->streams = {stream};
    stream->capture->thread = std::this_thread::get_id();
    stream->capture->is_relaxed = is_relaxed;
    stream->tails.clear();
    if (!is_relaxed) ++captures_here();
    return cudaSuccess;
  }
  cudaError_t end_capture(cudaStream_t stream, cudaGraph_t* graph) {
    const std::lock_guard lock(mutex_);
    *graph = nullptr;
    const std::shared_ptr<Capture> capture = stream->capture;
    if (!capture || capture->streams[0] != stream)
      return fail(cudaErrorIllegalState, "this stream did not begin a capture");
    if (!capture->is_relaxed) {
      if (capture->thread != std::this_thread::get_id())
        return fail(cudaErrorStreamCaptureWrongThread, "another thread began the capture");
      --captures_here();
    }
    const bool is_joined = joins_all(*capture);
    for (cudaStream_t one : capture->streams) {
      one->capture.reset();
      one->tails.clear();
    }
    if (capture->is_invalid)
      return fail(cudaErrorStreamCaptureInvalidated, "the capture was invalidated");
    if (!is_joined)
      return fail(cudaErrorStreamCaptureUnjoined, "a stream of the capture was not joined");
    *graph = new CUgraph_st{capture->nodes};
    return cudaSuccess;
  }
  cudaStreamCaptureStatus capture_status(cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    if (stream == nullptr || !stream->capture) return cudaStreamCaptureStatusNone;
    return stream->capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
  }
  /// Is the calling thread in a capture that allows it no calls that wait?
  bool is_capturing_here() {
    const std::lock_guard lock(mutex_);
    if (captures_here() == 0) return false;
    for (cudaStream_t stream : streams_) {
      if (stream->capture && !stream->capture->is_relaxed &&
          stream->capture->thread == std::this_thread::get_id())
        stream->capture->is_invalid = true;
    }
    return true;
  }

  /// Runs a graph's nodes one by one, in an order of chance.
  static void play(const std::vector<Node>& nodes, std::mt19937& chance) {
    std::vector<bool> done(nodes.size());
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      std::vector<std::size_t> ready;
      for (std::size_t i = 0; i < nodes.size(); ++i) {
        if (!done[i] && std::all_of(nodes[i].after.begin(), nodes[i].after.end(),
                                    [&](std::size_t before) { return done[before]; }))
          ready.push_back(i);
      }
      const std::size_t next = ready[chance() % ready.size()];
      current_gpu = nodes[next].gpu;
      nodes[next].work();
      done[next] = true;
    }
  }

 private:
  Gpu() = default;

  static Gpu*& instance() {
    static Gpu* gpu = [] {
      pthread_atfork(nullptr, nullptr, [] { instance() = new Gpu; });  // threads are not inherited
      return new Gpu;
    }();
    return gpu;
  }
  static int& captures_here() {
    static thread_local int captures = 0;
    return captures;
  }

  static bool is_ready(const Item& item) {
    if (item.wait != nullptr) return item.wait->reached >= item.number;
    return !item.is_ready || item.is_ready();
  }

  void reach(CUevent_st& event, std::uint64_t number) {
    if (event.reached < number) {
      event.reached = number;
      event.time = std::chrono::steady_clock::now();
    }
    for (cudaStream_t stream : std::exchange(event.waiting, {})) stream->changed.notify_all();
    finished_.notify_all();
  }

  void run(CUstream_st& stream) {
    current_gpu = stream.gpu;
    std::mt19937 chance(std::random_device{}());
    std::unique_lock lock(mutex_);
    while (true) {
      while (stream.items.empty() ? !stream.is_ending : !is_ready(stream.items.front())) {
        if (!stream.items.empty() && stream.items.front().wait != nullptr)
          stream.items.front().wait->waiting.push_back(&stream);
        stream.changed.wait(lock);
      }
      if (stream.items.empty()) return;
      const Item item = std::move(stream.items.front());
      if (item.work) {
        lock.unlock();
        if (chance() % 4 == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(chance() % 300));
        item.work();
        current_gpu = stream.gpu;
        lock.lock();
      }
      if (item.record != nullptr) reach(*item.record, item.number);
      stream.items.pop_front();
      ++stream.finished;
      finished_.notify_all();
    }
  }

  // ---- Captures, all with the lock held

  cudaError_t invalidate(CUstream_st& stream) {
    stream.capture->is_invalid = true;
    return fail(cudaErrorStreamCaptureUnsupported, "a captured stream cannot be waited for");
  }
  cudaError_t add_to_capture(CUstream_st& stream, Item item) {
    Capture& capture = *stream.capture;
    if (capture.is_invalid)
      return fail(cudaErrorStreamCaptureInvalidated, "the capture was invalidated");
    if (item.wait != nullptr) {
      if (item.wait->recorded == 0) return cudaSuccess;
      capture.is_invalid = true;
      return fail(cudaErrorStreamCaptureIsolation, "a capture waits for what is not part of it");
    }
    if (item.record != nullptr) {
      item.record->capture = stream.capture;
      item.record->tails = stream.tails;
      return cudaSuccess;
    }
    capture.nodes.push_back({std::move(item.work), stream.gpu, stream.tails});
    stream.tails = {capture.nodes.size() - 1};
    return cudaSuccess;
  }
  cudaError_t wait_captured(CUstream_st& stream, const CUevent_st& event) {
    const bool is_open = event.capture->streams[0]->capture == event.capture;
    if (!is_open)
      return fail(cudaErrorCapturedEvent, "the event is part of a capture that is over");
    if (!stream.capture) {
      stream.capture = event.capture;
      stream.capture->streams.push_back(&stream);
      stream.tails.clear();
    }
    if (stream.capture != event.capture) {
      stream.capture->is_invalid = event.capture->is_invalid = true;
      return fail(cudaErrorStreamCaptureMerge, "two captures wait for each other");
    }
    add(stream.tails, event.tails);
    return cudaSuccess;
  }
  /// Is everything on the way to the end of the stream that began?
  static bool joins_all(const Capture& capture) {
    std::vector<bool> joined(capture.nodes.size());
    std::vector<std::size_t> next = capture.streams[0]->tails;
    while (!next.empty()) {
      const std::size_t node = next.back();
      next.pop_back();
      if (joined[node]) continue;
      joined[node] = true;
      add(next, capture.nodes[node].after);
    }
    return std::all_of(joined.begin(), joined.end(), [](bool is) { return is; });
  }

  std::mutex mutex_;
  std::condition_variable finished_;
  std::set<cudaStream_t> streams_;
  std::vector<std::unique_ptr<CUevent_st>> events_;
  std::mutex defaults_mutex_;
  std::array<cudaStream_t, most_gpus> defaults_ = {};
};

}  // namespace emulated
