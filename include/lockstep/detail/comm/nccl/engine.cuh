// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file One rank's end of an NCCL communicator, shared by the calling thread and the watchdog.

#include <nccl.h>
#include <deque>

#include "lockstep/detail/comm/call/fault_channel.hpp"
#include "lockstep/detail/comm/call/library_engine.hpp"
#include "lockstep/detail/comm/rank_gpu.cuh"
#include "lockstep/detail/core/deadline.hpp"
#include "lockstep/detail/device/cuda/step_graph.cuh"

namespace lockstep::detail::nccl {

using Clock = std::chrono::steady_clock;

inline const char* advice(ncclResult_t result) {
  switch (result) {
    case ncclUnhandledCudaError:
      return "an earlier CUDA call failed, or the GPU's memory is used up: NCCL_DEBUG=INFO shows "
             "which";
    case ncclSystemError:
      return "NCCL_DEBUG=INFO shows which system call failed; for sockets NCCL_SOCKET_IFNAME "
             "chooses the network interface";
    case ncclInvalidUsage:
      return "NCCL wants one GPU per rank, the same version everywhere, and the same calls of all "
             "ranks";
    case ncclRemoteError:
      return "another rank ended, or the network failed: look at the other ranks first";
    default:
      return "NCCL_DEBUG=INFO shows more";
  }
}

/// NCCL's error string and last log message; marked as a consequence if another rank is the cause.
inline Error error_of(ncclResult_t result, const std::string& operation) {
  std::string message = ncclGetErrorString(result);
  if (const std::string last = ncclGetLastError(nullptr); !last.empty()) message += ", " + last;
  Error error(operation, message, advice(result), rank_of_thread());
  return result == ncclRemoteError ? error.as_consequence() : error;
}

/// Was the call accepted? It may continue in the background.
inline bool is_made(ncclResult_t result) {
  return result == ncclSuccess || result == ncclInProgress;
}

/// Zeroed device memory from NCCL's allocator (zero-copy), or from CUDA's if that fails.
class Arena {
 public:
  explicit Arena(std::size_t bytes) : bytes_(bytes) {
    void* data = nullptr;
    if (bytes == 0) return;
    if (ncclMemAlloc(&data, bytes) == ncclSuccess) {
      data_.reset(static_cast<std::byte*>(data));
      check_cuda(cudaMemset(data, 0, bytes), "cudaMemset");
      // Other streams do not wait for the default stream.
      check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    } else {
      static_cast<void>(cudaGetLastError());
      plain_.emplace(bytes);
    }
  }

  std::byte* data() const { return plain_ ? plain_->data() : data_.get(); }

  /// Registers the memory with a communicator. If that fails, NCCL copies instead.
  void add_to(ncclComm_t comm) {
    if (data_ == nullptr) return;
    if (ncclCommRegister(comm, data_.get(), bytes_, &registration_) != ncclSuccess) {
      registration_ = nullptr;
      static_cast<void>(cudaGetLastError());
    }
  }
  /// Called before the communicator is destroyed, after its last use of the memory.
  void remove_from(ncclComm_t comm) {
    if (registration_ != nullptr) static_cast<void>(ncclCommDeregister(comm, registration_));
    registration_ = nullptr;
  }

 private:
  std::unique_ptr<std::byte, CudaDelete<ncclMemFree>> data_;
  std::optional<DeviceArena> plain_;
  std::size_t bytes_;
  void* registration_ = nullptr;
};

/// A ring buffer of calls, which complete in order. Not thread-safe: the engine locks.
class CallRing {
 public:
  static constexpr std::size_t most = 256;

  struct Slot {
    CudaEvent before;
    CudaEvent after;
    Call call;
    std::uint64_t record = 0;  // of the flight recorder
    std::optional<Clock::time_point> begun;
  };

  bool is_full() const { return next_ - first_ == most; }
  bool is_empty() const { return next_ == first_; }

  /// The slot that `push` uses.
  const Slot& next() const { return slots_[next_ % most]; }
  std::uint64_t push(const Call& call, std::uint64_t record) {
    slots_[next_ % most].call = call;
    slots_[next_ % most].record = record;
    slots_[next_ % most].begun.reset();
    return next_++;
  }

  void retire(FlightRecorder& recorder) {
    for (; !is_empty() && slots_[first_ % most].after.test(); ++first_)
      recorder.complete(slots_[first_ % most].record);
  }
  bool is_over(std::uint64_t number) const { return number < first_; }
  void block(cudaStream_t stream, std::uint64_t number) const {
    if (!is_over(number)) slots_[number % most].after.block(stream);
  }
  void block_by_last(cudaStream_t stream) const {
    if (!is_empty()) block(stream, next_ - 1);
  }

  /// The oldest call, once the GPU has reached it: waiting for the model's kernels does not count.
  std::optional<PendingCall> oldest(Clock::time_point now, FlightRecorder& recorder) {
    Slot& slot = slots_[first_ % most];
    if (!slot.begun && slot.before.test()) {
      slot.begun = now;
      recorder.start(slot.record);
    }
    if (!slot.begun) return std::nullopt;
    return PendingCall{slot.call, *slot.begun};
  }

 private:
  std::unique_ptr<Slot[]> slots_ = std::make_unique<Slot[]>(most);
  std::uint64_t first_ = 0;
  std::uint64_t next_ = 0;
};

struct Ticket {
  std::uint64_t number = 0;
  bool captured = false;
};

/// NCCL is not thread-safe: each call holds the mutex, and no thread waits while it holds it.
///
/// The first fault is final: the watchdog aborts NCCL's kernels, and every later call throws it.
class Engine : public LibraryEngine {
 public:
  /// Allocates everything on the given GPU, before ranks wait for each other in `connect`.
  Engine(const Membership& member, std::string name, std::shared_ptr<Gpu> gpu,
         std::shared_ptr<Store> store)
      : LibraryEngine("nccl", member, std::move(name)),
        gpu_(std::move(gpu)),
        store_(std::move(store)),
        making_(std::in_place, gpu_->index()) {
    making_.reset();
    if (world() > 1) channel_.emplace(store_, name_, rank());
  }
  /// An engine for another communicator of this rank, on the same GPU.
  std::shared_ptr<Engine> beside(const std::string& name, Rank rank, WorldSize world) const {
    return std::make_shared<Engine>(LibraryEngine::beside(rank, world), name, gpu_, store_);
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine() {
    if (comm_ != nullptr) abort();
  }

  Gpu& gpu() const { return *gpu_; }
  Store& store() const { return *store_; }
  std::string text() const { return "NCCL's communicator '" + name_ + "'"; }
  cudaStream_t stream() const { return stream_.get(); }
  /// The ranks' fault channel; none in a world of one.
  const std::optional<FaultChannel>& channel() const { return channel_; }

  /// Gets NCCL's communicator from `start(&comm)`. **Ranks** all. **Host** blocks until all join.
  template <class Start>
  void connect(const Start& start) {
    const OnGpu current(gpu().index());
    ncclResult_t state = start(&comm_);
    if (is_made(state)) state = await_state(Deadline::after(timeout()));
    if (state == ncclSuccess) return;
    const std::string operation = "joining " + text();
    const Error error =
        state != ncclInProgress
            ? error_of(state, operation)
            : Error(operation, "the other ranks did not come within " + seconds_text(timeout()),
                    "see whether all were started and can reach each other (NCCL_SOCKET_IFNAME "
                    "chooses the network, NCCL_DEBUG=INFO shows more)",
                    rank());
    abort();
    throw Error(error);
  }

  /// Makes an NCCL call, `call(comm)`. **Host** blocks until it has completed or is enqueued.
  template <class F>
  void nccl(const char* name, const F& call) {
    ncclResult_t result = ncclSuccess;
    {
      const std::lock_guard lock(mutex());
      pending_.raise_fault();
      result = call(comm_);
    }
    if (is_made(result)) {
      // Another rank's fault or a disagreement explains a failure better than NCCL does.
      result = await_state(Deadline::never(), channel_ ? reason_limit : Milliseconds(0));
      if (result == ncclSuccess) return;
    }
    const Error error = error_of(result, name);
    fail(error);
    throw Error(error);
  }

  /// NCCL's asynchronous error: other ranks may be gone, or the network broken.
  ncclResult_t state() const {
    const std::lock_guard lock(mutex());
    ncclResult_t state = ncclSuccess;
    if (comm_ == nullptr || is_broken()) return state;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
    return asked == ncclSuccess ? state : asked;
  }

  /// `body()` enqueues the call's work on `stream()`, which waits for the compute stream first.
  template <class Body>
  Ticket post(const Call& call, const Body& body) {
    raise_fault();
    const OnGpu current(gpu().index());  // kernels must be launched on the GPU of their stream
    return make(call, is_capturing(), [&](const CallRing::Slot& slot) {
      slot.before.record(gpu().stream());
      slot.before.block(stream_);
      body();
      slot.after.record(stream_);
    });
  }

  /// **Host** does not block. **Stream** the compute stream waits for the call.
  void order(Ticket ticket) {
    raise_fault();
    const std::lock_guard lock(mutex());
    ring(ticket.captured).block(gpu().stream(), ticket.number);
  }

  void order_all() {
    raise_fault();
    const bool captured = is_capturing();
    const std::lock_guard lock(mutex());
    if (!captured || !captured_calls_.empty()) ring(captured).block_by_last(gpu().stream());
  }

  /// Has the call completed? A captured one never has.
  bool test(Ticket ticket) {
    const bool is_whole = !is_broken();  // an abort completes calls, too
    const bool over = !ticket.captured && is_over(ticket);
    if (!over || !is_whole) raise_fault();
    return over;
  }

  /// **Host** blocks until the call has completed.
  void wait(Ticket ticket) {
    poll_until([&] { return test(ticket); });
  }

  /// An exception unwinds while the call may be in flight (a captured one has not run): aborts.
  /// **Host** blocks until the GPU has finished with the call's memory, or the abort is too slow.
  void leave(Ticket ticket) noexcept {
    if (ticket.captured) return;
    try {
      if (is_over(ticket)) return;
      give_up();
      if (!await_abort()) return;
      poll_until([&] { return is_over(ticket); });
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): a GPU that has failed runs nothing
    }
  }

  /// **Host** blocks until the compute stream is idle.
  void synchronize() {
    await_stream(gpu().stream(), [&] { raise_fault(); });
  }

  /// Throws the fault, if any, after NCCL's kernels have ended, so that their memory can be freed.
  /// In a capture it throws at once, because the abort waits for all graphs, including this one.
  void raise_fault() {
    if (!is_broken()) [[likely]]
      return;
    if (capture_status() == cudaStreamCaptureStatusNone) await_abort();
    pending_.raise_fault();
  }

  /// Records the fault if it is the first, and publishes its reason.
  void fail(const Error& error) { fail(error, error.text()); }
  void give_up(std::string_view reason = ended_by_exception) {
    fail(gave_up(text(), reason, rank()), reason);
  }

  std::byte* allocate(std::size_t bytes) {
    const OnGpu current(gpu().index());
    Arena& arena = arenas_.emplace_back(bytes);
    const std::lock_guard lock(mutex());
    if (comm_ != nullptr) arena.add_to(comm_);
    return arena.data();
  }

  /// Stages host data. Allocated once: allocation in a call may wait for GPUs that await this rank.
  static constexpr std::size_t staged_bytes = 4_MiB;
  std::byte* staged_on_host() const { return on_host_.data(); }
  std::byte* staged_on_gpu() const { return on_gpu_.data(); }

  /// For reductions of gathered pieces. It never moves, because captured steps refer to it.
  static constexpr std::size_t scratch_bytes = 16_MiB;
  std::byte* scratch() const { return scratch_.data(); }

  void require_no_capture(const Call& call, const char* advice) const {
    if (!is_capturing()) return;
    throw Error(call.text(), "this needs the host, and the step is being captured", advice, rank());
  }

  /// Ends a capture. Its calls are logged if all ranks have the graph, else dropped.
  void adopt(const StepGraph& graph) {
    if (graph) {
      const std::lock_guard lock(mutex());
      std::erase_if(graphs_, [](const auto& known) { return known.expired(); });
      graphs_.push_back(graph.executable());
      for (const Call& call : captured_calls_) log_.add(call);
    }
    captured_calls_.clear();
  }

  void replay(const StepGraph& graph) {
    const Call call{CollectiveKind::replay, step_call_of_thread(JobCall::none)};
    raise_fault();
    require_no_capture(call, "replay it outside of the step");
    if (!graph) graph.launch(gpu().stream());  // throws the reason why there is none
    make(call, false, [&](const CallRing::Slot& slot) {
      const std::lock_guard lock(mutex());  // the graph must not be destroyed meanwhile
      in_flight_.block_by_last(gpu().stream());
      slot.before.record(gpu().stream());
      pending_.raise_fault();
      graph.launch(gpu().stream());
      slot.after.record(gpu().stream());
    });
  }

  template <class F>
  auto with_log(const F& f) const {
    const std::lock_guard lock(mutex());
    return f(log_);
  }

  /// The call that has waited longest: on the GPU, or for NCCL to enqueue it.
  std::optional<PendingCall> waiting() {
    const std::lock_guard lock(mutex());
    in_flight_.retire(pending_.recorder());
    return in_flight_.is_empty() ? issued_ : in_flight_.oldest(Clock::now(), pending_.recorder());
  }

  /// Destroys the graphs, for which NCCL would wait, and aborts NCCL's kernels and communicator.
  void abort() {
    end_graphs();
    ncclComm_t comm = nullptr;
    {
      const std::lock_guard lock(mutex());
      std::swap(comm, comm_);
    }
    if (comm != nullptr) static_cast<void>(ncclCommAbort(comm));
    pending_.change([&] { aborted_ = true; });
  }

  /// **Host** blocks until all calls have completed, up to the timeout.
  void drain() {
    const Deadline deadline = Deadline::after(timeout());
    poll_until([&] { return is_broken() || is_idle() || deadline.passed(); });
    if (is_broken() || is_idle()) return;
    fail(Error("closing the communicator", "its calls do not end",
               "see what keeps the compute stream from getting to them", rank()));
  }
  /// Destroys NCCL's communicator, after all calls and the watchdog.
  void close() {
    if (comm_ == nullptr) return;
    end_graphs();
    for (Arena& arena : arenas_) arena.remove_from(comm_);
    if (is_made(ncclCommFinalize(comm_)) &&
        await_state(Deadline::after(timeout())) == ncclSuccess) {
      static_cast<void>(ncclCommDestroy(std::exchange(comm_, nullptr)));
    } else {
      abort();
    }
  }

  /// The result of a split: a member, because NCCL writes it in the background.
  ncclComm_t& split_result() { return split_result_; }

 private:
  static constexpr Milliseconds abort_limit{10'000};
  /// The watchdog explains a failure that NCCL reports within this time.
  static constexpr Milliseconds reason_limit{2'000};

  std::mutex& mutex() const { return pending_.mutex(); }

  /// Waits for NCCL's background work. Returns NCCL's state, `ncclInProgress` at the deadline.
  /// After a failure, waits `for_reason` for the fault and throws it.
  ncclResult_t await_state(Deadline deadline, Milliseconds for_reason = Milliseconds(0)) {
    ncclResult_t now = ncclSuccess;
    std::optional<Deadline> explained;
    poll_until([&] {
      now = state();
      pending_.raise_fault();
      if (now == ncclSuccess) return true;
      if (now != ncclInProgress && !explained) explained = Deadline::after(for_reason);
      return (now == ncclInProgress ? deadline : *explained).passed();
    });
    return now;
  }

  void fail(const Error& error, std::string_view reason) {
    if (!pending_.note(error) || !channel_) return;
    try {
      channel_->fail(reason);
    } catch (const Error&) {
      // Without a store, the other ranks notice by themselves.
    }
  }

  /// After a fault: **Host** blocks until NCCL's kernels have ended. False after `abort_limit`.
  bool await_abort() {
    return pending_.wait(abort_limit, [&] { return aborted_; });
  }

  void end_graphs() {
    const std::lock_guard lock(mutex());
    for (const auto& known : graphs_) {
      if (const auto graph = known.lock()) graph->reset();
    }
    graphs_.clear();
  }

  cudaStreamCaptureStatus capture_status() const { return detail::capture_status(gpu().stream()); }
  bool is_capturing() const {
    const cudaStreamCaptureStatus status = capture_status();
    if (status == cudaStreamCaptureStatusInvalidated) {
      // An NCCL call would fail now and leave NCCL unusable.
      throw Error("capture", "the step has called something that a graph cannot hold",
                  "leave out what waits for the stream, allocates, or uses the default stream",
                  rank());
    }
    return status == cudaStreamCaptureStatusActive;
  }

  bool is_over(Ticket ticket) {
    const std::lock_guard lock(mutex());
    in_flight_.retire(pending_.recorder());
    return in_flight_.is_over(ticket.number);
  }
  bool is_idle() {
    const std::lock_guard lock(mutex());
    in_flight_.retire(pending_.recorder());
    return in_flight_.is_empty();
  }
  /// **Host** blocks while `CallRing::most` calls are in flight.
  void make_room() {
    poll_until([&] {
      {
        const std::lock_guard lock(mutex());
        if (in_flight_.is_full()) in_flight_.retire(pending_.recorder());
        if (!in_flight_.is_full()) return true;
      }
      raise_fault();
      return false;
    });
  }

  CallRing& ring(bool captured) { return captured ? captured_ : in_flight_; }

  /// Logs a call and enqueues it with `enqueue(slot)`.
  template <class Enqueue>
  Ticket make(const Call& call, bool captured, const Enqueue& enqueue) {
    if (!captured) make_room();
    std::uint64_t record = 0;
    {
      const std::lock_guard lock(mutex());
      issued_ = PendingCall{call, Clock::now()};
      if (!captured) record = pending_.recorder().schedule(call);
      // Messages are between two ranks, so the others cannot compare them.
      if (call.kind != CollectiveKind::send && call.kind != CollectiveKind::receive) {
        if (captured) {
          captured_calls_.push_back(call);
        } else {
          log_.add(call);
        }
      }
    }
    try {
      enqueue(ring(captured).next());
    } catch (const Error& error) {
      {
        const std::lock_guard lock(mutex());
        issued_.reset();
      }
      // A failed capture has enqueued nothing, so the communicator is still usable.
      if (captured && !is_broken()) throw;
      fail(error);
    }
    raise_fault();
    const std::lock_guard lock(mutex());
    issued_.reset();
    return {ring(captured).push(call, record), captured};
  }

  std::shared_ptr<Gpu> gpu_;
  std::shared_ptr<Store> store_;
  std::optional<OnGpu> making_;  // sets the device for the members below
  CudaStream stream_ = CudaStream::urgent();
  std::deque<Arena> arenas_;
  PinnedArena on_host_{staged_bytes};
  DeviceArena on_gpu_{staged_bytes};
  DeviceArena scratch_{scratch_bytes};
  /// Captured calls never complete: the graph keeps their order, and their events are reused.
  CallRing captured_;
  std::vector<Call> captured_calls_;
  ncclComm_t split_result_ = nullptr;
  std::optional<FaultChannel> channel_;

  // The mutex of `pending_` guards the members below.
  ncclComm_t comm_ = nullptr;
  std::vector<std::weak_ptr<StepGraph::Executable>> graphs_;  // contain NCCL's kernels
  bool aborted_ = false;
  CallRing in_flight_;
  CallLog log_;
  std::optional<PendingCall> issued_;  // not yet on the stream
};

}  // namespace lockstep::detail::nccl
