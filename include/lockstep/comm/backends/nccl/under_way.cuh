// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The calls whose work is on the GPU and not known to be over, oldest first.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "lockstep/comm/call.hpp"
#include "lockstep/device/cuda/stream.cuh"

namespace lockstep::detail::nccl {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

/// The points around a call's work: when it could begin, and when it was over.
struct CallEvents {
  CudaEvent before;
  CudaEvent after;
};

/// A ring of calls that end in the order of their numbers. Not thread-safe: the engine locks.
class UnderWay {
 public:
  static constexpr std::size_t most = 256;

  /// A call that has begun and is not over.
  struct Begun {
    Call call;
    Clock::time_point since;
  };

  bool is_full() const { return next_ - first_ == most; }
  bool is_empty() const { return next_ == first_; }

  /// The events of the next call; they count from `push` on.
  const CallEvents& next_events() const { return places_[next_ % most].events; }
  std::uint64_t push(const Call& call) {
    places_[next_ % most].call = call;
    places_[next_ % most].begun.reset();
    return next_++;
  }

  /// Forgets the calls that are over.
  void retire() {
    while (!is_empty() && places_[first_ % most].events.after.test()) ++first_;
  }
  bool is_over(std::uint64_t number) const { return number < first_; }
  const CudaEvent& after(std::uint64_t number) const { return places_[number % most].events.after; }
  /// The last call, if it may not be over.
  const CudaEvent* last() const { return is_empty() ? nullptr : &after(next_ - 1); }

  /// The oldest call, once the GPU has got to it: while it waits for the model's kernels, which may
  /// take as long as they like, its time does not count.
  std::optional<Begun> oldest(Clock::time_point now) {
    retire();
    if (is_empty()) return std::nullopt;
    Place& place = places_[first_ % most];
    if (!place.begun && place.events.before.test()) place.begun = now;
    if (!place.begun) return std::nullopt;
    return Begun{place.call, *place.begun};
  }

 private:
  struct Place {
    CallEvents events;
    Call call;
    std::optional<Clock::time_point> begun;
  };

  std::unique_ptr<Place[]> places_ = std::make_unique<Place[]>(most);
  std::uint64_t first_ = 0;
  std::uint64_t next_ = 0;
};

/// The events of calls that are captured. A graph keeps the order that they stand for, so they can
/// be recorded again for another call. They cannot be tested.
class CapturedEvents {
 public:
  const CallEvents& next() const { return events_[next_ % UnderWay::most]; }
  std::uint64_t push() { return next_++; }
  const CudaEvent& after(std::uint64_t number) const {
    return events_[number % UnderWay::most].after;
  }
  /// The last call, where there is one in the capture.
  const CudaEvent& last() const { return after(next_ - 1); }

 private:
  std::unique_ptr<CallEvents[]> events_ = std::make_unique<CallEvents[]>(UnderWay::most);
  std::uint64_t next_ = 0;
};

}  // namespace lockstep::detail::nccl
