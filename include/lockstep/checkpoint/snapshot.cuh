// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Copies of what a replica keeps in a GPU's memory, while steps go on.

#include <cuda_runtime_api.h>
#include <algorithm>
#include <cstddef>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/checkpoint/state.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/runtime.cuh"
#include "lockstep/device/device.hpp"

namespace lockstep::detail {

/// Copies go out through a stream of their own, between two steps: they wait for the steps so far,
/// and later steps wait for them. The host waits for neither.
///
/// Elements are copied as they are held. Those whose type in a file is another one are converted by
/// whoever waits for the copies. They lie at the end of their place in the copy, from where they
/// grow into it; those that shrink lie in memory of their own.
///
/// A job may have several savers, whose threads wait for copies at the same time, and while another
/// saver starts new ones. A conversion in place that is done twice would destroy its elements, so
/// that one thread at a time waits and converts, and every conversion is forgotten when it is done.
template <class Comm>
class StateCopies<Cuda, Comm> {
 public:
  using Memory = PinnedArena;

  explicit StateCopies(Comm& comm) : comm_(comm) {}

  void out(std::span<const StateCopy> copies) {
    const std::lock_guard lock(mutex_);
    await_and_convert();
    reserve(copies);
    if (!way_) way_.emplace();
    const cudaStream_t steps = comm_.gpu().stream();
    way_->begun.record(steps);
    way_->begun.block(way_->stream);
    std::size_t shrunk = 0;
    for (const StateCopy& copy : copies) {
      const StateEntry& piece = *copy.piece;
      if (piece.on_host) {
        copy_out_of_host(copy);
        continue;
      }
      const std::size_t bytes = held_bytes(piece);
      std::byte* to = copy.to;
      if (shrinks(piece)) {
        to = shrinking_.data() + shrunk;
        shrunk += align_up(bytes);
      } else {
        to += piece.file_bytes() - bytes;
      }
      if (bytes != 0) {
        check_cuda(cudaMemcpyAsync(to, piece.data, bytes, cudaMemcpyDeviceToHost, way_->stream),
                   "cudaMemcpyAsync");
      }
      if (piece.held != piece.whole.element)
        conversions_.push_back({copy.to, piece.whole.element, to, piece.held, piece.count});
    }
    way_->done.record(way_->stream);
    way_->done.block(steps);
  }

  void await() {
    const std::lock_guard lock(mutex_);
    await_and_convert();
  }

  /// The compute stream must be empty.
  void in(const StateEntry& piece, const std::byte* from) {
    if (piece.on_host) return copy_into_host(piece, from);
    staging_.copy(piece.data, piece.held, from, piece.whole.element, piece.count);
    if (piece.derived != nullptr)
      staging_.copy(piece.derived, piece.derived_kind, from, piece.whole.element, piece.count);
  }

 private:
  struct Way {
    CudaStream stream;
    CudaEvent begun;
    CudaEvent done;
  };
  struct Conversion {
    std::byte* to;
    ElementKind to_kind;
    const std::byte* from;
    ElementKind from_kind;
    std::size_t count;
  };

  static std::size_t held_bytes(const StateEntry& piece) {
    return piece.count * element_size(piece.held);
  }
  static bool shrinks(const StateEntry& piece) {
    return !piece.on_host && element_size(piece.held) > element_size(piece.whole.element);
  }
  void reserve(std::span<const StateCopy> copies) {
    std::size_t bytes = 0;
    for (const StateCopy& copy : copies) {
      if (shrinks(*copy.piece)) bytes += align_up(held_bytes(*copy.piece));
    }
    if (bytes > shrinking_.bytes()) shrinking_ = PinnedArena(bytes);
  }

  void await_and_convert() {
    if (!way_) return;
    way_->done.synchronize();
    for (const Conversion& next : conversions_)
      convert_elements(next.to, next.to_kind, next.from, next.from_kind, next.count);
    conversions_.clear();
  }

  Comm& comm_;
  std::mutex mutex_;        // of all below but `staging_`
  std::optional<Way> way_;  // of jobs that save
  std::vector<Conversion> conversions_;
  PinnedArena shrinking_{0};
  HostStaging staging_;
};

}  // namespace lockstep::detail
