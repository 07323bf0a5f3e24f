// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The backward pass of a pretended model: arithmetic in layers, a bucket of gradients after
/// each.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/detail/comm/shm/communicator.hpp"
#include "processes.hpp"

namespace bench {

inline constexpr std::size_t layers = 4;
inline constexpr std::size_t slices = 8;  // of a layer: between them, work under way may be polled

/// Arithmetic on private data that stays in the second-level cache, so that it needs a core and
/// nothing else.
class Compute {
 public:
  void slice(std::size_t passes) {
    for (std::size_t p = 0; p < passes; ++p) {
      for (float& x : data_) x = x * 0.999f + 0.001f;
      asm volatile("" ::"r"(data_.data()) : "memory");
    }
  }

  /// How many passes make a slice of about this length, on an idle core.
  std::size_t calibrate(std::chrono::microseconds length) {
    constexpr std::size_t probe = 200;
    auto best = Clock::duration::max();
    for (int i = 0; i < 20; ++i) {
      const auto begin = Clock::now();
      slice(probe);
      best = std::min(best, Clock::now() - begin);
    }
    return static_cast<std::size_t>(probe * length / best) + 1;
  }

 private:
  std::vector<float> data_ = std::vector<float>(16384, 1.0f);
};

enum class How { no_communication, blocking, at_the_end, polled };

/// A rank's model: computes, and has its buckets averaged in the way it is told.
template <class Who>
class Step {
 public:
  using Communicator = lockstep::ShmCommunicator<2, Who>;
  using Work = decltype(std::declval<Communicator&>().all_reduce_async(
      std::declval<std::span<float>&>(), lockstep::Average{}));

  Step(Communicator& comm, Compute& compute, std::size_t passes, std::size_t count)
      : comm_(comm), compute_(compute), passes_(passes) {
    for (auto& bucket : buckets_) bucket = comm.template allocate<float>(count);
  }

  void run(How how) {
    for (std::size_t layer = 0; layer < layers; ++layer) {
      for (std::size_t s = 0; s < slices; ++s) {
        compute_.slice(passes_);
        if (how == How::polled) poll(layer);
      }
      if (how == How::at_the_end || how == How::polled) {
        works_[layer].reset(new Work(comm_.all_reduce_async(buckets_[layer], lockstep::Average{})));
      }
    }
    for (std::size_t layer = 0; layer < layers; ++layer) {
      if (how == How::blocking) comm_.all_reduce(buckets_[layer], lockstep::Average{});
      if (works_[layer]) works_[layer]->wait();
      works_[layer].reset();
    }
  }

  std::span<float> bucket(std::size_t layer) const { return buckets_[layer]; }

 private:
  void poll(std::size_t posted) {
    for (std::size_t layer = 0; layer < posted; ++layer) {
      if (works_[layer] && works_[layer]->test()) works_[layer].reset();
    }
  }

  Communicator& comm_;
  Compute& compute_;
  std::size_t passes_;
  std::array<std::span<float>, layers> buckets_;
  std::array<std::unique_ptr<Work>, layers> works_;
};

}  // namespace bench
