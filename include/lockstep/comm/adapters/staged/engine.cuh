// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Makes the calls of a staged communicator one after the other, on the caller's thread or on
/// a thread for asynchronous calls. When one fails, all end.

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "lockstep/comm/adapters/staged/pipeline.cuh"
#include "lockstep/comm/call/pending_calls.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/stream.cuh"
#include "lockstep/device/device.hpp"

namespace lockstep::detail::staged {

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
    // The thread of asynchronous calls uses this rank's GPU, and its errors name this rank.
    const auto select_gpu = [this] {
      rank_of_thread() = gpu_->rank();
      check_cuda(cudaSetDevice(gpu_->device()), "cudaSetDevice");
    };
    PendingInQueue<Engine, decltype(select_gpu)>(*this, select_gpu).wait();
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  ~Engine() {
    if (scope_.is_failure()) give_up();
    queue_.drain();
    pipeline_.settle();
  }

  Inner& inner() { return inner_; }
  const std::shared_ptr<Gpu>& gpu() const { return gpu_; }
  cudaStream_t stream() const { return gpu_->stream(); }
  TaskQueue& queue() { return queue_; }

  bool is_broken() const { return inner_.is_broken(); }
  /// An exception has ended this rank's part: ends what is under way, and tells the others.
  void give_up() { inner_.give_up(); }

  // Calls

  /// Makes a call on this thread, after all calls under way. **Host** blocks until it is made.
  /// **Stream** it comes after what the compute stream holds, and before what that is given next.
  template <class C>
  void make(const C& call) {
    begin(call.call(), events_);
    queue_.drain();
    guarded([&] { stage(call, events_); });
    events_.done.block(stream());
  }

  /// Notes when the memory of a call may be used.
  void begin(const Call& call, const CallEvents& events) const {
    require_no_capture(call);
    events.ready.record(stream());
  }

  /// Makes a call piece by piece. **Stream** `events.done` tells of the result. A call of several
  /// pieces is compared as a whole first, because pieces of different calls can be equal.
  template <class C>
  void stage(const C& call, const CallEvents& events) {
    using T = typename C::element;
    const std::size_t world = inner_.world_size().value();
    const Transfer<T> what{call.count, C::deals_pieces ? world : 1,
                           C::is_in_place ? 0 : (C::collects_pieces ? world : 1), call.in.data(),
                           call.out.data()};
    const bool is_cut = what.pieces() > 1;
    pipeline_.run(what, events.ready, events.done, [&](const Piece<T>& piece) {
      if (is_cut && piece.first) {
        Call whole = call.call();
        whole.staged = true;  // differs from the same call in one piece
        inner_.agree(whole);
      }
      inner_.perform(call.on(call.in.empty() ? std::span<T>() : piece.in,
                             call.out.empty() ? std::span<T>() : piece.out, piece.length));
    });
  }

  /// **Host** blocks until the message is in the other rank's hands, or in this one's GPU.
  template <class C>
  void pass_message(const C& call) {
    using T = typename C::element;
    require_no_capture(call.call());
    const std::size_t bytes = call.count * sizeof(T);
    if (!message_ || message_->bytes() < bytes) message_.emplace(bytes);
    const std::span<T> message(reinterpret_cast<T*>(message_->data()), call.count);
    if constexpr (C::kind == CollectiveKind::send) {
      copy(message.data(), call.in.data(), bytes, cudaMemcpyDeviceToHost);
      inner_.perform(call.on(message, {}, call.count));
    } else {
      inner_.perform(call.on({}, message, call.count));
      copy(call.out.data(), message.data(), bytes, cudaMemcpyHostToDevice);
    }
  }

  /// After the first failure every later call fails with it, on all ranks.
  template <class F>
  void guarded(const F& f) {
    fault_.raise();
    try {
      f();
    } catch (const Error& error) {
      fault_.note(error);
      if (!inner_.is_broken()) inner_.abandon(error.text());
      pipeline_.settle();
      throw;
    }
  }

 private:
  /// Memory is pinned by pages, so these pages must hold nothing else.
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

  void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) const {
    check_cuda(cudaMemcpyAsync(to, from, bytes, kind, stream()), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
  }

  EndOfScope scope_;
  Inner inner_;
  std::shared_ptr<Gpu> gpu_;
  std::span<std::byte> staging_;
  PinnedRange pinned_;
  Pipeline pipeline_;
  CallEvents events_;  // of calls that are made here and now
  std::optional<HostArena> message_;
  FirstFault fault_;
  TaskQueue queue_{call_thread};  // ends before what its calls use
};

}  // namespace lockstep::detail::staged
