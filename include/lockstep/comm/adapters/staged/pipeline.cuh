// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Copies device memory through the host in pieces: while the host works on one piece, the
/// next comes down from the GPU and the one before goes up.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <utility>

#include "lockstep/comm/call/peers.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/stream.cuh"

namespace lockstep::detail::staged {

/// The size of a piece. A network of 10 Gbit/s needs 3 ms for it, and a further call costs 0.1 ms.
/// A bucket of 25 MiB has seven pieces, so the two copies that nothing hides, the first down and
/// the last up, are a small part of the time.
inline constexpr std::size_t slot_bytes = 4_MiB;

/// The memory that a collective reads and writes, as consecutive rows of one length: one row, or
/// one for each rank. A piece is cut across all rows, in the same places on all ranks.
template <class T>
struct Transfer {
  std::size_t length;        // of a row
  std::size_t in_rows = 1;   // on the ranks that give anything
  std::size_t out_rows = 0;  // on the ranks that get anything; 0: the result replaces `in`
  const T* in = nullptr;     // device memory; nothing where this rank gives nothing
  T* out = nullptr;          // device memory; nothing where this rank gets nothing

  /// The length of a piece's rows, except in the last piece.
  constexpr std::size_t width() const {
    return (slot_bytes - arena_alignment) / ((in_rows + out_rows) * sizeof(T));
  }
  constexpr std::size_t pieces() const {
    return std::max<std::size_t>(1, (length + width() - 1) / width());
  }
};

/// A piece in host memory: consecutive rows of one length.
template <class T>
struct Piece {
  std::span<T> in;
  std::span<T> out;    // the same as `in` where the result takes its place
  std::size_t length;  // of a row
  bool first;
};

/// Used by one thread at a time.
class Pipeline {
 public:
  /// One piece goes up, one is worked on, one comes down.
  static constexpr std::size_t slots = 3;

  /// `memory` must be pinned. Streams and events are made for the current GPU.
  explicit Pipeline(std::span<std::byte> memory) {
    for (std::size_t i = 0; i < slots; ++i)
      slots_[i].memory = memory.subspan(i * slot_bytes, slot_bytes);
  }

  /// Calls `work(piece)` for every piece in turn. **Host** blocks until the last piece's work was
  /// done. **Stream** memory is read and written after `ready`; `done` is recorded when all is
  /// written.
  template <class T, class Work>
  void run(const Transfer<T>& what, const CudaEvent& ready, const CudaEvent& done,
           const Work& work) {
    ready.block(down_);
    ready.block(up_);
    const std::size_t pieces = what.pieces();
    fetch(what, 0);
    for (std::size_t k = 0; k < pieces; ++k) {
      if (k + 1 < pieces) fetch(what, k + 1);
      const Backoff backoff;
      while (!slot(k).fetched.test()) backoff.pause();
      work(piece(what, k));
      deliver(what, k);
    }
    first_ = (first_ + pieces) % slots;
    done.record(up_);
  }

  /// **Host** blocks until all copies have ended.
  void settle() const {
    static_cast<void>(cudaStreamSynchronize(down_));
    static_cast<void>(cudaStreamSynchronize(up_));
  }

 private:
  struct Slot {
    std::span<std::byte> memory;
    CudaEvent fetched;    // its piece has come down, or the slot is free
    CudaEvent delivered;  // its piece has gone up
  };

  Slot& slot(std::size_t k) { return slots_[(first_ + k) % slots]; }

  /// How far a piece reaches, in each row.
  template <class T>
  static std::pair<std::size_t, std::size_t> extent(const Transfer<T>& what, std::size_t k) {
    const std::size_t begin = k * what.width();
    return {begin, std::min(what.width(), what.length - begin)};
  }

  template <class T>
  Piece<T> piece(const Transfer<T>& what, std::size_t k) {
    const std::size_t n = extent(what, k).second;
    T* const in = reinterpret_cast<T*>(slot(k).memory.data());
    const std::span<T> given(in, what.in_rows * n);
    if (what.out_rows == 0) return {given, given, n, k == 0};
    T* const out =
        reinterpret_cast<T*>(slot(k).memory.data() + align_up(what.in_rows * n * sizeof(T)));
    return {given, {out, what.out_rows * n}, n, k == 0};
  }

  template <class T>
  void fetch(const Transfer<T>& what, std::size_t k) {
    slot(k).delivered.block(down_);
    if (what.in != nullptr) {
      const auto [begin, n] = extent(what, k);
      T* const to = piece(what, k).in.data();
      for (std::size_t row = 0; row < what.in_rows; ++row)
        copy(to + row * n, what.in + row * what.length + begin, n * sizeof(T),
             cudaMemcpyDeviceToHost, down_);
    }
    slot(k).fetched.record(down_);
  }

  template <class T>
  void deliver(const Transfer<T>& what, std::size_t k) {
    if (what.out != nullptr) {
      const auto [begin, n] = extent(what, k);
      const std::span<T> from = piece(what, k).out;
      const std::size_t rows = what.out_rows == 0 ? what.in_rows : what.out_rows;
      for (std::size_t row = 0; row < rows; ++row)
        copy(what.out + row * what.length + begin, from.data() + row * n, n * sizeof(T),
             cudaMemcpyHostToDevice, up_);
    }
    slot(k).delivered.record(up_);
  }

  static void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                   cudaStream_t stream) {
    if (bytes != 0) check_cuda(cudaMemcpyAsync(to, from, bytes, kind, stream), "cudaMemcpyAsync");
  }

  std::array<Slot, slots> slots_;
  std::size_t first_ = 0;  // where the next call begins: behind the last piece of the one before
  CudaStream down_ = CudaStream::urgent();
  CudaStream up_ = CudaStream::urgent();
};

}  // namespace lockstep::detail::staged
