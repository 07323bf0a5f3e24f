// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Calls of a host's communicator for a GPU's memory: made one after the other, on the
/// caller's thread or on one of their own, and ended together when one fails.

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/waiting/queue.hpp"
#include "lockstep/comm/adapters/staged/pipeline.cuh"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/stream.cuh"
#include "lockstep/device/host_arena.hpp"

namespace lockstep::staged {

/// When a call's memory may be used, and when its result is there.
struct CallEvents {
  CudaEvent ready;
  CudaEvent done;
};

template <class Inner>
class Engine {
 public:
  /// **Ranks** all where `inner` allocates together. **Host** may block.
  Engine(Inner inner, std::shared_ptr<Gpu> gpu)
      : inner_(std::move(inner)),
        gpu_(std::move(gpu)),
        staging_(whole_pages(Pipeline::slots * slot_bytes)),
        pinned_(staging_),
        pipeline_(staging_) {
    // The thread of asynchronous calls is of this GPU, and this rank.
    queue_.wait(*queue_.post([rank = gpu_->rank(), index = static_cast<int>(gpu_->index())] {
      rank_of_thread() = rank;
      check_cuda(cudaSetDevice(index), "cudaSetDevice");
    }));
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  ~Engine() {
    if (std::uncaught_exceptions() > exceptions_) give_up();
    queue_.drain();
    pipeline_.settle();
  }

  Inner& inner() { return inner_; }
  const std::shared_ptr<Gpu>& gpu() const { return gpu_; }
  cudaStream_t stream() const { return gpu_->stream(); }
  Queue& queue() { return queue_; }

  bool is_broken() const { return inner_.is_broken(); }
  /// An exception has ended this rank's part: ends what is under way, and tells the others.
  void give_up() { inner_.give_up(); }

  // Calls

  /// Makes a call here and now, behind all that are under way. **Host** blocks until it is made.
  /// **Stream** it comes after what the compute stream holds, and before what that is given next.
  template <class T, class Body>
  void make(const Call& call, const Transfer<T>& what, const Body& body) {
    begin(call, events_);
    queue_.drain();
    guarded([&] { stage(call, what, events_, body); });
    events_.done.block(stream());
  }

  /// The same on the other thread. **Host** does not block. **Stream** only `done` tells of the
  /// result.
  template <class T, class Body>
  std::shared_ptr<QueuedCall> post(const Call& call, const Transfer<T>& what,
                                   const std::shared_ptr<const CallEvents>& events,
                                   const Body& body) {
    begin(call, *events);
    return queue_.post(
        [this, call, what, events, body] { guarded([&] { stage(call, what, *events, body); }); });
  }

  /// A call with the host's memory.
  template <class Body>
  std::shared_ptr<QueuedCall> post(const Body& body) {
    return queue_.post([this, body] { guarded(body); });
  }

  /// Brings a whole message down, or up after `receive(bytes)`. Messages are compared as a whole,
  /// so they are staged as a whole. **Host** blocks until all is copied.
  std::span<std::byte> fetch(const Call& call, const void* data, std::size_t bytes) {
    require_no_capture(call);
    const std::span<std::byte> message = reserve(bytes);
    copy(message.data(), data, bytes, cudaMemcpyDeviceToHost);
    return message;
  }
  template <class Receive>
  void deliver(const Call& call, void* data, std::size_t bytes, const Receive& receive) {
    require_no_capture(call);
    const std::span<std::byte> message = reserve(bytes);
    receive(message);
    copy(data, message.data(), bytes, cudaMemcpyHostToDevice);
  }

 private:
  /// Pinning takes pages, and these must be nobody else's.
  std::span<std::byte> whole_pages(std::size_t bytes) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const std::span<std::uint8_t> memory =
        inner_.template allocate<std::uint8_t>(align_up(bytes, page) + page);
    const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
    return std::as_writable_bytes(memory).subspan(align_up(begin, page) - begin,
                                                  align_up(bytes, page));
  }

  void require_no_capture(const Call& call) const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream(), &status), "cudaStreamIsCapturing");
    if (status == cudaStreamCaptureStatusNone) return;
    throw Error(call.text(), "the host takes part in it, and the stream is being captured",
                "make this call outside of the capture", gpu_->rank());
  }

  void begin(const Call& call, const CallEvents& events) const {
    require_no_capture(call);
    events.ready.record(stream());
  }

  /// A call of several pieces is compared as a whole first: its pieces may agree where it does not.
  template <class T, class Body>
  void stage(const Call& call, const Transfer<T>& what, const CallEvents& events,
             const Body& body) {
    Call whole = call;
    whole.staged = true;  // whoever makes it in one piece makes another call
    const bool is_cut = what.pieces() > 1;
    pipeline_.run(what, events.ready, events.done, [&](const Piece<T>& piece) {
      if (is_cut && piece.first) inner_.agree(whole);
      body(inner_, piece);
    });
  }

  /// The first failure is that of every call that follows, on all ranks.
  template <class F>
  void guarded(const F& f) {
    if (fault_) throw Error(*fault_);
    try {
      f();
    } catch (const Error& error) {
      fault_.emplace(error);
      if (!inner_.is_broken()) inner_.abandon(error.text());
      pipeline_.settle();
      throw;
    }
  }

  std::span<std::byte> reserve(std::size_t bytes) {
    if (!message_ || message_->bytes() < bytes) message_.emplace(bytes);
    return {message_->data(), bytes};
  }
  void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) const {
    check_cuda(cudaMemcpyAsync(to, from, bytes, kind, stream()), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
  }

  int exceptions_ = std::uncaught_exceptions();
  Inner inner_;
  std::shared_ptr<Gpu> gpu_;
  std::span<std::byte> staging_;
  PinnedRange pinned_;
  Pipeline pipeline_;
  CallEvents events_;  // of calls that are made here and now
  std::optional<HostArena> message_;
  std::optional<Error> fault_;  // known to whoever makes calls: one thread at a time
  Queue queue_;                 // ends before what its calls use
};

}  // namespace lockstep::staged
