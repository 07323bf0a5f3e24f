// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Copies of a replica's state between GPU and host memory, while training continues.

#include <mutex>

#include "lockstep/detail/checkpoint/state.hpp"
#include "lockstep/detail/device/cuda/memory.cuh"

namespace lockstep::detail {

/// Copies use their own stream, which waits for the steps so far, and later steps wait for the
/// copies; the host does not block. Where the file's type differs from the held type, elements are
/// copied to extra memory, and `await` converts them. The mutex is for several savers' threads.
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
    std::byte* next = unconverted_.data();
    for (const StateCopy& copy : copies) {
      const StateEntry& piece = copy.piece;
      if (piece.on_host) {
        copy_out_of_host(copy);
        continue;
      }
      std::byte* to = copy.to;
      if (converts(piece)) {
        to = std::exchange(next, next + align_up(held_bytes(piece)));
        conversions_.emplace_back(copy).piece.data = to;
      }
      if (piece.count != 0) {
        check_cuda(cudaMemcpyAsync(to, piece.data, held_bytes(piece), cudaMemcpyDeviceToHost,
                                   way_->stream),
                   "cudaMemcpyAsync");
      }
    }
    way_->done.record(way_->stream);
    way_->done.block(steps);
  }

  void await() {
    const std::lock_guard lock(mutex_);
    await_and_convert();
  }

  /// The compute stream must be idle.
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
  static std::size_t held_bytes(const StateEntry& piece) {
    return piece.count * element_size(piece.held);
  }
  static bool converts(const StateEntry& piece) {
    return !piece.on_host && piece.held != piece.whole.element;
  }
  void reserve(std::span<const StateCopy> copies) {
    std::size_t bytes = 0;
    for (const StateCopy& copy : copies)
      if (converts(copy.piece)) bytes += align_up(held_bytes(copy.piece));
    if (bytes > unconverted_.bytes()) unconverted_ = PinnedArena(bytes);
  }

  void await_and_convert() {
    if (!way_) return;
    way_->done.synchronize();
    for (const StateCopy& copy : conversions_) copy_out_of_host(copy);
    conversions_.clear();
  }

  Comm& comm_;
  std::mutex mutex_;                    // guards all below but `staging_`
  std::optional<Way> way_;              // only in jobs that save
  std::vector<StateCopy> conversions_;  // of pieces that were copied to the host as they are held
  PinnedArena unconverted_{0};
  HostStaging staging_;
};

}  // namespace lockstep::detail
