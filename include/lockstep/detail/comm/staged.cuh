// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Device memory for a host's communicator: staged in pieces, whose copies overlap with work.

#include <unistd.h>
#include <functional>

#include "lockstep/detail/comm/call/watchdog.hpp"
#include "lockstep/detail/comm/collectives.hpp"
#include "lockstep/detail/comm/rank_gpu.cuh"
#include "lockstep/detail/device/cuda/step_graph.cuh"

namespace lockstep::detail::staged {

/// A piece takes 3 ms at 10 Gbit/s, a further call 0.1 ms; a bucket of 25 MiB has seven pieces.
inline constexpr std::size_t slot_bytes = 4_MiB;

/// A call's memory: one row, or one per rank. Pieces are cut across all rows, alike on all ranks.
template <class T>
struct Transfer {
  std::size_t length;        // of a row
  std::size_t in_rows = 1;   // on the ranks that give anything
  std::size_t out_rows = 0;  // on the ranks that get anything; 0: the result replaces `in`
  const T* in = nullptr;     // device memory; null if this rank gives nothing
  T* out = nullptr;          // device memory; null if this rank gets nothing

  /// The length of a piece's rows, except in the last piece.
  constexpr std::size_t width() const {
    return (slot_bytes - arena_alignment) / ((in_rows + out_rows) * sizeof(T));
  }
  constexpr std::size_t pieces() const {
    return std::max<std::size_t>(1, (length + width() - 1) / width());
  }
  constexpr std::size_t width(std::size_t k) const {
    return std::min(width(), length - k * width());
  }
};

/// The copies of one call's pieces. Used by one thread at a time.
class Pipeline {
 public:
  /// One piece is uploaded, one is worked on, one is downloaded.
  static constexpr std::size_t slots = 3;

  /// `memory` must be pinned. Streams and events are made for the current GPU.
  explicit Pipeline(std::span<std::byte> memory) {
    for (std::size_t i = 0; i < slots; ++i)
      slots_[i].memory = memory.subspan(i * slot_bytes, slot_bytes);
  }

  /// Calls `work(in, out, k)` for every piece k, in pinned memory. **Host** blocks until the last
  /// call returns. **Stream** copies wait for `ready`; `done` follows the last copy.
  template <class T, class Work>
  void run(const Transfer<T>& what, const CudaEvent& ready, const CudaEvent& done,
           const Work& work) {
    ready.block(down_);
    ready.block(up_);
    const std::size_t pieces = what.pieces();
    fetch(what, 0);
    for (std::size_t k = 0; k < pieces; ++k) {
      if (k + 1 < pieces) fetch(what, k + 1);
      poll_until([&] { return slot(k).fetched.test(); });
      work(in(what, k), out(what, k), k);
      deliver(what, k);
    }
    first_ = (first_ + pieces) % slots;
    done.record(up_);
  }

  /// **Host** blocks until all copies have ended.
  void synchronize() const {
    static_cast<void>(cudaStreamSynchronize(down_));
    static_cast<void>(cudaStreamSynchronize(up_));
  }

 private:
  struct Slot {
    std::span<std::byte> memory;
    CudaEvent fetched;    // its piece is downloaded, or the slot is free
    CudaEvent delivered;  // its piece is uploaded
  };

  Slot& slot(std::size_t k) { return slots_[(first_ + k) % slots]; }

  template <class T>
  std::span<T> in(const Transfer<T>& what, std::size_t k) {
    return {reinterpret_cast<T*>(slot(k).memory.data()), what.in_rows * what.width(k)};
  }
  template <class T>
  std::span<T> out(const Transfer<T>& what, std::size_t k) {
    if (what.out_rows == 0) return in(what, k);
    std::byte* const after_in = slot(k).memory.data() + align_up(in(what, k).size_bytes());
    return {reinterpret_cast<T*>(after_in), what.out_rows * what.width(k)};
  }

  /// Copies row by row: `rows` of n elements each, which begin `to_pitch` and `from_pitch` apart.
  template <class T>
  static void copy(T* to, std::size_t to_pitch, const T* from, std::size_t from_pitch,
                   std::size_t n, std::size_t rows, cudaMemcpyKind kind, cudaStream_t stream) {
    for (std::size_t row = 0; n != 0 && row < rows; ++row)
      check_cuda(cudaMemcpyAsync(to + row * to_pitch, from + row * from_pitch, n * sizeof(T), kind,
                                 stream),
                 "cudaMemcpyAsync");
  }

  template <class T>
  void fetch(const Transfer<T>& what, std::size_t k) {
    slot(k).delivered.block(down_);
    const std::size_t n = what.width(k);
    if (what.in != nullptr)
      copy(in(what, k).data(), n, what.in + k * what.width(), what.length, n, what.in_rows,
           cudaMemcpyDeviceToHost, down_);
    slot(k).fetched.record(down_);
  }

  template <class T>
  void deliver(const Transfer<T>& what, std::size_t k) {
    const std::size_t n = what.width(k);
    if (what.out != nullptr)
      copy(what.out + k * what.width(), what.length, out(what, k).data(), n, n,
           what.out_rows == 0 ? what.in_rows : what.out_rows, cudaMemcpyHostToDevice, up_);
    slot(k).delivered.record(up_);
  }

  std::array<Slot, slots> slots_;
  std::size_t first_ = 0;  // the slot of the next call's first piece
  CudaStream down_ = CudaStream::urgent();
  CudaStream up_ = CudaStream::urgent();
};

template <class Inner>
class Engine {
 public:
  Inner inner;
  std::shared_ptr<Gpu> gpu;

  /// **Ranks** all if `allocate` of `inner` is collective. **Host** may block.
  Engine(Inner communicator, std::shared_ptr<Gpu> own)
      : inner(std::move(communicator)),
        gpu(std::move(own)),
        staging_(whole_pages(Pipeline::slots * slot_bytes)),
        pinned_(pin(staging_)),
        pipeline_(staging_),
        events_(*gpu) {
    // The thread of asynchronous calls uses this rank's GPU, and its errors name this rank.
    const auto select_gpu = [this] {
      rank_of_thread() = gpu->rank();
      check_cuda(cudaSetDevice(gpu->device()), "cudaSetDevice");
    };
    PendingInQueue<Engine, decltype(select_gpu)>(*this, select_gpu).wait();
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  ~Engine() {
    if (scope_.is_failure()) give_up();
    queue_.drain();
    pipeline_.synchronize();
  }

  cudaStream_t stream() const { return gpu->stream(); }
  TaskQueue& queue() { return queue_; }
  /// Aborts because an exception has ended this rank's part: ends the calls in flight on all ranks.
  void give_up() { inner.give_up(); }
  Inner& drained() {
    queue_.drain();
    return inner;
  }

  /// Executes a call on this thread, after those in flight. **Host** blocks until the result's
  /// upload is enqueued. **Stream** ordered in the compute stream.
  template <class C>
  void make(const C& call) {
    const CudaEvent& ready = begin(call.call());
    const CudaEvent& done = events_.next();
    queue_.drain();
    guarded([&] { stage(call, ready, done); });
    done.block(stream());
  }

  /// Starts a call, which another thread makes.
  template <class C>
  auto start(const C& call) {
    const bool on_host = is_host_call(call, *gpu);
    const CudaEvent* const ready = on_host ? nullptr : &begin(call.call());
    const CudaEvent* const done = on_host ? nullptr : &events_.next();
    const auto later = [this, call, ready, done] {
      guarded([&] { done == nullptr ? inner.perform(call) : stage(call, *ready, *done); });
    };
    return Work<PendingOnGpu<Engine, decltype(later)>>(std::in_place, *this, later, done, stream());
  }

  /// Executes a call piece by piece. **Stream** `done` follows the result. A call of several
  /// pieces is first compared as a whole, because pieces of different calls can be equal.
  template <class C>
  void stage(const C& call, const CudaEvent& ready, const CudaEvent& done) {
    using T = typename C::element;
    const std::size_t world = inner.world_size().value();
    const Transfer<T> what{call.count, C::deals_pieces ? world : 1,
                           C::is_in_place ? 0 : (C::collects_pieces ? world : 1), call.in.data(),
                           call.out.data()};
    pipeline_.run(what, ready, done, [&](std::span<T> in, std::span<T> out, std::size_t k) {
      if (k == 0 && what.pieces() > 1) {
        Call whole = call.call();
        whole.staged = true;  // differs from the same call in one piece
        inner.agree(whole);
      }
      inner.perform(call.on(call.in.empty() ? std::span<T>() : in,
                            call.out.empty() ? std::span<T>() : out, what.width(k)));
    });
  }

  /// **Host** blocks until `inner` has sent the message, or until it is in device memory here.
  template <class C>
  void pass_message(const C& call) {
    using T = typename C::element;
    require_no_capture(call.call());
    if constexpr (requires { inner.takes_device_messages(); }) {
      if (inner.takes_device_messages()) {
        check_cuda(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
        return inner.perform(call);
      }
    }
    const std::size_t bytes = call.count * sizeof(T);
    if (!message_ || message_->bytes() < bytes) message_.emplace(bytes);
    const std::span<T> message(reinterpret_cast<T*>(message_->data()), call.count);
    const auto copy = [&](void* to, const void* from, cudaMemcpyKind kind) {
      check_cuda(cudaMemcpyAsync(to, from, bytes, kind, stream()), "cudaMemcpyAsync");
      check_cuda(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
    };
    if constexpr (C::kind == CollectiveKind::send) {
      copy(message.data(), call.in.data(), cudaMemcpyDeviceToHost);
      inner.perform(call.on(message, {}, call.count));
    } else {
      inner.perform(call.on({}, message, call.count));
      copy(call.out.data(), message.data(), cudaMemcpyHostToDevice);
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
      if (!inner.is_broken()) inner.abort(error.text());
      pipeline_.synchronize();
      throw;
    }
  }

 private:
  /// Memory is pinned by pages, so these pages must hold nothing else.
  std::span<std::byte> whole_pages(std::size_t bytes) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const std::span<std::uint8_t> memory =
        inner.template allocate<std::uint8_t>(align_up(bytes, page) + page);
    const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
    return std::as_writable_bytes(memory).subspan(align_up(begin, page) - begin,
                                                  align_up(bytes, page));
  }

  /// The event of when the memory of a call may be used.
  const CudaEvent& begin(const Call& call) {
    require_no_capture(call);
    const CudaEvent& ready = events_.next();
    ready.record(stream());
    return ready;
  }

  void require_no_capture(const Call& call) const {
    if (capture_status(stream()) == cudaStreamCaptureStatusNone) return;
    throw Error(call.text(), "the host takes part in it, and the stream is being captured",
                "make this call outside of the capture", gpu->rank());
  }

  EndOfScope scope_;
  std::span<std::byte> staging_;
  PinnedRange pinned_;
  Pipeline pipeline_;
  EventRing events_;
  std::optional<HostArena> message_;
  FirstFault fault_;
  TaskQueue queue_{call_thread};  // ends before what its calls use
};

}  // namespace lockstep::detail::staged

namespace lockstep {

/// Collectives for device memory through `Inner`, which handles host memory only. Results,
/// comparison of calls, timeouts and errors are those of `Inner`; the time of a call counts from
/// the end of the work before it. All ranks pass device memory, or all host memory. Another thread
/// executes asynchronous calls in order. No call can be captured: the host takes part in it.
///
/// **Host** every collective blocks until the result's upload is enqueued; with host memory, until
/// the result is here. **Stream** a call follows what the compute stream `gpu().stream()` holds,
/// and work enqueued after it, or after `wait` of an asynchronous call, sees the result.
template <Communicator Inner>
class StagedCommunicator : public Collectives<StagedCommunicator<Inner>>,
                           public detail::DeviceAllocating {
  using Engine = detail::staged::Engine<Inner>;

 public:
  /// Calls in flight have no limit; this number is large enough for every job.
  static constexpr std::size_t most_in_flight = 256;

  /// **Ranks** all. **Host** may block.
  StagedCommunicator(Inner inner, std::shared_ptr<Gpu> gpu)
      : engine_(std::make_unique<Engine>(std::move(inner), std::move(gpu))) {}

  Rank rank() const { return engine_->inner.rank(); }
  WorldSize world_size() const { return engine_->inner.world_size(); }
  Gpu& gpu() const { return *engine_->gpu; }
  std::chrono::milliseconds timeout() const { return engine_->inner.timeout(); }
  void set_timeout(std::chrono::milliseconds timeout) { engine_->drained().set_timeout(timeout); }
  void abort(std::string_view reason) { engine_->drained().abort(reason); }

  /// **Ranks** this one. **Host** blocks until the compute stream is empty.
  void synchronize() const {
    check_cuda(cudaStreamSynchronize(engine_->stream()), "cudaStreamSynchronize");
  }

  // Called by `Collectives` and by adapters.

  template <class C>
  void perform(const C& call) {
    if constexpr (C::kind == detail::CollectiveKind::barrier) {
      synchronize();
      engine_->drained().perform(call);
    } else if constexpr (C::is_message) {
      // `Inner` compares a message as a whole, so it is staged as a whole.
      if (detail::is_host_call(call, gpu())) return engine_->inner.perform(call);
      engine_->pass_message(call);
    } else {
      if (detail::is_host_call(call, gpu())) return engine_->drained().perform(call);
      engine_->make(call);
    }
  }

  void agree(const detail::Call& call) { engine_->drained().agree(call); }

  template <class C>
  auto start(const C& call) {
    return engine_->start(call);
  }

  detail::StreamCopies passes() const { return detail::StreamCopies(engine_->stream()); }

  /// The group's communicator stages for the group of `Inner`, on the same GPU and compute stream.
  template <std::size_t GroupRanks>
  auto split(const detail::GroupPosition& position) {
    auto inner = engine_->drained().template split<GroupRanks>(position);
    std::optional<StagedCommunicator<typename decltype(inner)::value_type>> group;
    if (inner) group.emplace(std::move(*inner), engine_->gpu);
    return group;
  }

 private:
  std::unique_ptr<Engine> engine_;
};

/// Joins the communicator `make(member, store, name)` for device memory of each rank's GPU.
/// **Ranks** all. **Host** blocks until all have joined.
template <class Make>
auto make_staged_communicator(const Membership& member, Store& store, const std::string& name,
                              const Make& make) {
  std::shared_ptr<Gpu> gpu = detail::gpu_of_process(member, store, name);
  auto inner = make(member, store, name);
  return StagedCommunicator<decltype(inner)>(std::move(inner), std::move(gpu));
}

}  // namespace lockstep
