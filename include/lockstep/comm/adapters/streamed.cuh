// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A communicator that works on a stream of its own, beside the one on which its rank
/// computes.

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/waiting/backoff.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/stream.cuh"

namespace lockstep {

/// A call on another stream. The handle waits when it goes out of scope.
class StreamWork {
 public:
  StreamWork(cudaStream_t compute, std::unique_ptr<const CudaEvent> done)
      : compute_(compute), done_(std::move(done)) {}
  StreamWork(const StreamWork&) = delete;
  StreamWork& operator=(const StreamWork&) = delete;

  ~StreamWork() noexcept(false) {
    if (std::uncaught_exceptions() == exceptions_) wait();
  }

  /// Is the result there? **Host** does not block.
  bool test() const { return done_->test(); }

  /// **Host** does not block. **Stream** what the compute stream is given from here on sees the
  /// result.
  void wait() {
    if (!waited_) done_->block(compute_);
    waited_ = true;
  }

 private:
  cudaStream_t compute_;
  std::unique_ptr<const CudaEvent> done_;
  bool waited_ = false;
  int exceptions_ = std::uncaught_exceptions();
};

/// Collectives of `Inner`, whose calls are ordered by the stream of `lane`, for a rank that
/// computes on that of `gpu`: the two wait for each other by events.
///
/// Every collective: **Ranks** all of them, in the same order. **Host** blocks as `Inner` does.
/// **Stream** it comes after what the compute stream `gpu().stream()` holds, and what that is given
/// afterwards sees the result.
template <Communicator Inner>
class StreamedCommunicator {
 public:
  using Milliseconds = std::chrono::milliseconds;

  /// Any number of calls may be under way; this many are plenty.
  static constexpr std::size_t most_under_way = 256;

  StreamedCommunicator(Inner inner, std::shared_ptr<Gpu> gpu, std::shared_ptr<Gpu> lane)
      : gpu_(std::move(gpu)), lane_(std::move(lane)), inner_(std::move(inner)) {}

  StreamedCommunicator(StreamedCommunicator&&) noexcept = default;
  StreamedCommunicator& operator=(StreamedCommunicator&&) = delete;

  Rank rank() const { return inner_.rank(); }
  WorldSize world_size() const { return inner_.world_size(); }
  Gpu& gpu() const { return *gpu_; }
  Milliseconds timeout() const { return inner_.timeout(); }
  void set_timeout(Milliseconds timeout) { inner_.set_timeout(timeout); }

  /// `count` elements of the GPU, zeroed. The memory lives as long as the communicator.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    return inner_.template allocate<T>(count);
  }

  /// Gives up: every other rank's call fails with this reason.
  void abandon(std::string_view reason) { inner_.abandon(reason); }

  /// **Host** blocks until the compute streams of all ranks have got here.
  void barrier() {
    synchronize();
    inner_.barrier();
  }

  /// **Ranks** this one. **Host** blocks until the compute stream is empty, and throws what went
  /// wrong.
  void synchronize() {
    const Patience patience;
    while (true) {
      const cudaError_t state = cudaStreamQuery(gpu_->stream());
      inner_.raise_fault();
      if (state == cudaSuccess) return;
      if (state != cudaErrorNotReady) check_cuda(state, "the compute stream");
      patience.pause();
    }
  }

  /// data = op over ranks, on all ranks.
  template <class Data, class Op = Sum>
  void all_reduce(Data&& data, Op op = {}) {
    make([&] { inner_.all_reduce(data, op); });
  }

  /// The same, asynchronously. **Stream** it comes after what the compute stream holds; what that
  /// is given after `wait` of the handle sees the result. The data belongs to the call until then.
  template <class Data, class Op = Sum>
  StreamWork all_reduce_async(Data&& data, Op op = {}) {
    follow();
    inner_.all_reduce(data, op);
    auto done = std::make_unique<CudaEvent>();
    done->record(lane_->stream());
    return {gpu_->stream(), std::move(done)};
  }

  /// On `root`, data = op over ranks; elsewhere it keeps what it was.
  template <class Data, class Op = Sum>
  void reduce(Data&& data, Rank root, Op op = {}) {
    make([&] { inner_.reduce(data, root, op); });
  }

  /// data = root's data.
  template <class Data>
  void broadcast(Data&& data, Rank root) {
    make([&] { inner_.broadcast(data, root); });
  }

  /// out = every rank's in, one behind the other.
  template <class In, class Out>
  void all_gather(const In& in, Out&& out) {
    make([&] { inner_.all_gather(in, out); });
  }

  /// On `root`, out = every rank's in; elsewhere out is not used.
  template <class In, class Out>
  void gather(const In& in, Out&& out, Rank root) {
    make([&] { inner_.gather(in, out, root); });
  }

  /// out = this rank's piece of root's in. Elsewhere in is not used.
  template <class In, class Out>
  void scatter(const In& in, Out&& out, Rank root) {
    make([&] { inner_.scatter(in, out, root); });
  }

  /// out = op over ranks of this rank's piece of in.
  template <class In, class Out, class Op = Sum>
  void reduce_scatter(const In& in, Out&& out, Op op = {}) {
    make([&] { inner_.reduce_scatter(in, out, op); });
  }

  /// Piece w of out = piece `rank` of rank w's in.
  template <class In, class Out>
  void all_to_all(const In& in, Out&& out) {
    make([&] { inner_.all_to_all(in, out); });
  }

  /// Sends elements to one rank. **Ranks** this one, and `to` calls `receive`.
  template <class Data>
  void send(const Data& data, Rank to) {
    make([&] { inner_.send(data, to); });
  }

  /// Receives elements from one rank. **Ranks** this one, and `from` calls `send` with the same
  /// type and count.
  template <class Data>
  void receive(Data&& data, Rank from) {
    make([&] { inner_.receive(data, from); });
  }

 private:
  /// What the lane is given from here on comes after what the compute stream holds.
  void follow() const {
    turn_.record(gpu_->stream());
    turn_.block(lane_->stream());
  }

  template <class F>
  void make(const F& f) {
    follow();
    f();
    turn_.record(lane_->stream());
    turn_.block(gpu_->stream());
  }

  std::shared_ptr<Gpu> gpu_;
  std::shared_ptr<Gpu> lane_;
  CudaEvent turn_;
  Inner inner_;
};

}  // namespace lockstep
