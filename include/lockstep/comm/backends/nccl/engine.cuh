// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file One rank's end of an NCCL communicator: its calls in order, on the GPU and in its log.

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/nccl/join.cuh"
#include "lockstep/comm/backends/nccl/link.cuh"
#include "lockstep/comm/backends/nccl/memory.cuh"
#include "lockstep/comm/call/counter.hpp"
#include "lockstep/comm/call/fault_channel.hpp"
#include "lockstep/comm/call/peers.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/deadline.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/step_graph.cuh"
#include "lockstep/device/cuda/stream.cuh"
#include "lockstep/launch/store.hpp"

namespace lockstep::detail::nccl {

/// The points around a call's work: when it could begin, and when it was over.
struct CallEvents {
  CudaEvent before;
  CudaEvent after;
};

/// A ring of calls that end in the order of their numbers. Not thread-safe: the engine locks.
class UnderWay {
 public:
  static constexpr std::size_t most = 256;

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
  std::optional<PendingCall> oldest(Clock::time_point now) {
    retire();
    if (is_empty()) return std::nullopt;
    Place& place = places_[first_ % most];
    if (!place.begun && place.events.before.test()) place.begun = now;
    if (!place.begun) return std::nullopt;
    return PendingCall{place.call, *place.begun};
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

/// A call that was made, and how to find its events.
struct Ticket {
  std::uint64_t number = 0;
  bool captured = false;
};

class Engine {
 public:
  /// All memory, streams and events are made here, on the GPU that was given: before ranks meet in
  /// `connect`, so that nothing is allocated while a rank waits for another.
  explicit Engine(JoinOptions joined)
      : joined_(std::move(joined)),
        making_(std::in_place, gpu().index()),
        timeout_(joined_.timeout),
        link_(board_of(joined_)) {
    making_.reset();
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const JoinOptions& joined() const { return joined_; }
  Rank rank() const { return joined_.rank; }
  std::size_t world() const { return joined_.world.value(); }
  Gpu& gpu() const { return *joined_.gpu; }
  Link& link() { return link_; }
  /// The stream on which communication runs.
  cudaStream_t stream() const { return stream_.get(); }
  Milliseconds timeout() const { return timeout_.load(std::memory_order_relaxed); }
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }

  /// Gets NCCL's communicator from `start(place)`. **Ranks** all. **Host** blocks until all have
  /// come.
  template <class Start>
  void connect(const Start& start) {
    const OnGpu current(gpu().index());
    ncclResult_t state = start(link_.place());
    if (state == ncclSuccess || state == ncclInProgress)
      state = link_.settle(Deadline::after(timeout()));
    if (state == ncclSuccess) return;
    const Error error = not_joined(state);
    link_.abort();
    throw Error(error);
  }

  /// Makes a call that is none of the program's and in no log, and waits until it is over: NCCL
  /// connects ranks, and allocates, at the first call of each kind. **Ranks** all. **Host** blocks.
  template <class F>
  void make_first_call(const F& call) {
    if (world() == 1) return;
    const OnGpu current(gpu().index());
    const Deadline deadline = Deadline::after(timeout());
    ncclResult_t state = link_.try_nccl(call);
    if (state == ncclSuccess || state == ncclInProgress) state = link_.settle(deadline);
    require_joined(state);
    const CudaEvent& over = under_way_.next_events().after;  // no other call is being made
    over.record(stream_);
    const Backoff backoff;
    while (!over.test()) {
      if (deadline.passed()) require_joined(ncclInProgress);
      raise_fault();
      backoff.pause();
    }
  }

  // Calls

  /// Makes a call: `body()` puts its work on `stream()`, which waits for the compute stream first.
  template <class Body>
  Ticket post(const Call& call, const Body& body) {
    raise_fault();
    const bool captured = is_capturing();
    if (!captured) make_room();
    const CallEvents& events = begin(call, captured);
    try {
      events.before.record(gpu().stream());
      events.before.block(stream_);
      body();
      events.after.record(stream_);
    } catch (const Error& error) {
      forget_issued();
      // A capture that failed has done nothing: the communicator is as good as before.
      if (captured && !link_.is_broken()) throw;
      link_.fail(error);
    }
    raise_fault();
    return finish(call, captured);
  }

  /// **Host** does not block. **Stream** the compute stream waits for the call from here on.
  void order(Ticket ticket) {
    raise_fault();
    if (ticket.captured) {
      captured_.after(ticket.number).block(gpu().stream());
      return;
    }
    const std::lock_guard lock(link_.mutex());
    if (!under_way_.is_over(ticket.number)) under_way_.after(ticket.number).block(gpu().stream());
  }

  /// The same for all calls so far.
  void order_all() {
    raise_fault();
    const bool captured = is_capturing();
    const std::lock_guard lock(link_.mutex());
    if (captured) {
      if (!captured_calls_.empty()) captured_.last()->block(gpu().stream());
    } else if (const CudaEvent* last = under_way_.last()) {
      last->block(gpu().stream());
    }
  }

  /// Is the call over? One that was captured never is.
  bool test(Ticket ticket) {
    const bool over = !ticket.captured && is_over(ticket);
    raise_fault();  // an abort ends calls too
    return over;
  }

  /// **Host** blocks until the call is over.
  void wait(Ticket ticket) {
    const Backoff backoff;
    while (!test(ticket)) backoff.pause();
  }

  /// An exception has ended this rank's part while the call may be under way: gives up, and tells
  /// the others. **Host** blocks until the GPU is done with the call's memory, or for as long as an
  /// abort may take. A call in a capture that an exception ends has not happened.
  void leave(Ticket ticket) noexcept {
    if (ticket.captured) return;
    try {
      if (is_over(ticket)) return;
      give_up();
      if (!link_.await_abort()) return;
      const Backoff backoff;
      while (!is_over(ticket)) backoff.pause();
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): a GPU that has failed runs nothing
    }
  }

  /// **Host** blocks until the compute stream is empty.
  void synchronize() {
    const Backoff backoff;
    while (true) {
      const cudaError_t state = cudaStreamQuery(gpu().stream());
      raise_fault();
      if (state == cudaSuccess) return;
      if (state != cudaErrorNotReady) check_cuda(state, "the compute stream");
      backoff.pause();
    }
  }

  /// Throws the fault if there is one.
  void raise_fault() {
    if (link_.is_broken()) [[unlikely]]
      link_.raise_fault(capture_status() != cudaStreamCaptureStatusNone);
  }

  void fail(const Error& error) { link_.fail(error); }
  void give_up(std::string_view reason = ended_by_exception) {
    link_.fail(gave_up("NCCL's communicator '" + joined_.name + "'", reason, rank()), reason);
  }

  // Memory

  std::byte* allocate(std::size_t bytes) {
    const OnGpu current(gpu().index());
    Arena& arena = arenas_.emplace_back(bytes);
    const std::lock_guard lock(link_.mutex());
    if (*link_.place() != nullptr) arena.add_to(*link_.place());
    return arena.data();
  }
  const Staging& staging() const { return staging_; }
  /// Copies on the stream on which communication runs.
  void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) const {
    check_cuda(cudaMemcpyAsync(to, from, bytes, kind, stream_), "cudaMemcpyAsync");
  }

  /// The size of the memory for reductions of gathered pieces, which is never moved because
  /// captured steps refer to it.
  static constexpr std::size_t scratch_bytes = 16_MiB;
  std::byte* scratch() const { return scratch_.data(); }

  // Captured steps

  void require_no_capture(const Call& call, const char* advice) const {
    if (!is_capturing()) return;
    throw Error(call.text(), "this needs the host, and the step is being captured", advice, rank());
  }

  /// Ends a capture. Its calls go into the log if all ranks have the graph, else they are dropped.
  void adopt(const StepGraph& graph) {
    if (graph) {
      link_.add(graph);
      const std::lock_guard lock(link_.mutex());
      for (const Call& call : captured_calls_) log_.add(call);
    }
    captured_calls_.clear();
  }

  void replay(const StepGraph& graph) {
    Call call;
    call.kind = CollectiveKind::replay;
    call.part_of = step_call_of_thread(JobCall::none);
    raise_fault();
    require_no_capture(call, "replay it outside of the step");
    if (!graph) graph.launch(gpu().stream());  // throws, and says why there is none
    make_room();
    const CallEvents& events = begin(call, false);
    try {
      const std::lock_guard lock(link_.mutex());
      if (const CudaEvent* last = under_way_.last()) last->block(gpu().stream());
      events.before.record(gpu().stream());
      link_.launch(graph, gpu().stream());
      events.after.record(gpu().stream());
    } catch (const Error& error) {
      forget_issued();
      link_.fail(error);
    }
    raise_fault();
    finish(call, false);
  }

  // For the watchdog

  PendingCalls& pending() { return link_.pending(); }
  void abort() { link_.abort(); }

  CallLog log() const {
    const std::lock_guard lock(link_.mutex());
    return log_;
  }
  LogHead head() const {
    const std::lock_guard lock(link_.mutex());
    return log_.head();
  }
  std::optional<bool> differs(const LogHead& head) const {
    const std::lock_guard lock(link_.mutex());
    return log_.differs(head);
  }

  /// The call that has waited longest: on the GPU, or for NCCL to put it there.
  std::optional<PendingCall> waiting() {
    const std::lock_guard lock(link_.mutex());
    under_way_.retire();
    return under_way_.is_empty() ? issued_ : under_way_.oldest(Clock::now());
  }
  Position position() {
    const auto call = waiting();
    return {head().calls, call ? call->call.text() : ""};
  }

  // The end

  /// Waits until everything is off the GPU, within the time limit. Host: blocks.
  void drain() {
    const Deadline deadline = Deadline::after(timeout());
    const Backoff backoff;
    while (!link_.is_broken() && !is_idle()) {
      if (deadline.passed()) {
        link_.fail(Error("closing the communicator", "its calls do not end",
                         "see what keeps the compute stream from getting to them", rank()));
      }
      backoff.pause();
    }
  }
  void close() {
    link_.finalize(timeout(), [&](ncclComm_t comm) {
      for (Arena& arena : arenas_) arena.remove_from(comm);
    });
  }

  // Groups

  /// The result of a split. It is a member because NCCL writes it in the background.
  ncclComm_t& split_result() { return split_result_; }
  std::string next_group_name() { return joined_.name + "/" + std::to_string(groups_++); }

 private:
  Error not_joined(ncclResult_t state) const {
    const std::string operation = "joining NCCL's communicator '" + joined_.name + "'";
    if (state != ncclInProgress) return nccl_error(state, operation);
    return {operation, "the other ranks did not come within " + seconds_text(timeout()),
            "see whether all were started and can reach each other (NCCL_SOCKET_IFNAME chooses the "
            "network, NCCL_DEBUG=INFO shows more)",
            rank()};
  }
  void require_joined(ncclResult_t state) {
    if (state == ncclSuccess) return;
    link_.fail(not_joined(state));
    raise_fault();
  }

  static std::optional<NoticeBoard> board_of(const JoinOptions& joined) {
    if (joined.world == WorldSize{1}) return std::nullopt;
    return NoticeBoard(joined.store, joined.name, joined.rank);
  }

  cudaStreamCaptureStatus capture_status() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(gpu().stream(), &status), "cudaStreamIsCapturing");
    return status;
  }
  bool is_capturing() const {
    const cudaStreamCaptureStatus status = capture_status();
    if (status == cudaStreamCaptureStatusInvalidated) {
      // If NCCL were called now, it would fail and be unusable afterwards.
      throw Error("capture", "the step has called something that a graph cannot hold",
                  "leave out what waits for the stream, allocates, or uses the default stream",
                  rank());
    }
    return status == cudaStreamCaptureStatusActive;
  }

  bool is_over(Ticket ticket) {
    const std::lock_guard lock(link_.mutex());
    under_way_.retire();
    return under_way_.is_over(ticket.number);
  }
  bool is_idle() {
    const std::lock_guard lock(link_.mutex());
    under_way_.retire();
    return under_way_.is_empty();
  }
  /// Waits while the host is too many calls ahead of the GPU.
  void make_room() {
    const Backoff backoff;
    while (true) {
      {
        const std::lock_guard lock(link_.mutex());
        if (under_way_.is_full()) under_way_.retire();
        if (!under_way_.is_full()) return;
      }
      raise_fault();
      backoff.pause();
    }
  }

  const CallEvents& begin(const Call& call, bool captured) {
    const std::lock_guard lock(link_.mutex());
    issued_ = PendingCall{call, Clock::now()};
    // Messages are between two ranks only: the others cannot compare them.
    if (call.kind != CollectiveKind::send && call.kind != CollectiveKind::receive) {
      if (captured) {
        captured_calls_.push_back(call);
      } else {
        log_.add(call);
      }
    }
    return (captured ? captured_ : under_way_).next_events();
  }
  Ticket finish(const Call& call, bool captured) {
    const std::lock_guard lock(link_.mutex());
    issued_.reset();
    return {(captured ? captured_ : under_way_).push(call), captured};
  }
  void forget_issued() {
    const std::lock_guard lock(link_.mutex());
    issued_.reset();
  }

  JoinOptions joined_;
  std::optional<OnGpu> making_;  // while the members below are made
  std::atomic<Milliseconds> timeout_;
  CudaStream stream_ = CudaStream::urgent();
  std::deque<Arena> arenas_;
  Staging staging_;
  DeviceArena scratch_{scratch_bytes};
  /// Calls that are captured are never over: a graph keeps the order that their events stand for,
  /// which can be recorded again for another call.
  UnderWay captured_;
  std::vector<Call> captured_calls_;
  ncclComm_t split_result_ = nullptr;
  std::size_t groups_ = 0;

  Link link_;           // ends before the memory that NCCL uses
  UnderWay under_way_;  // this and the members below, with the link's mutex
  CallLog log_;
  std::optional<PendingCall> issued_;  // and not yet on the stream
};

/// Says that the first calls are not made at once.
struct WarmUpLater {};

/// **Ranks** all. **Host** blocks until the calls are over.
inline void warm_up(Engine& engine) {
  std::byte* const data = engine.scratch();
  const cudaStream_t stream = engine.stream();
  const std::size_t rank = engine.rank().value();
  // NCCL has one way for few bytes and another for many. Pieces are of whole packets, or those of
  // some ranks would not be aligned.
  constexpr std::size_t packet = 16;
  for (const std::size_t each :
       {packet, Engine::scratch_bytes / 4 / engine.world() / packet * packet}) {
    const std::size_t bytes = each * engine.world();
    engine.make_first_call([&](ncclComm_t comm) {
      return ncclAllReduce(data, data, bytes / sizeof(float), ncclFloat32, ncclSum, comm, stream);
    });
    engine.make_first_call([&](ncclComm_t comm) {
      return ncclBroadcast(data, data, bytes, ncclUint8, 0, comm, stream);
    });
    engine.make_first_call([&](ncclComm_t comm) {
      return ncclAllGather(data + rank * each, data, each, ncclUint8, comm, stream);
    });
    engine.make_first_call([&](ncclComm_t comm) {
      return ncclReduceScatter(data, data + rank * each, each / sizeof(float), ncclFloat32, ncclSum,
                               comm, stream);
    });
  }
}

/// The same for messages, between every two ranks: where many ranks are, they need much memory.
inline void warm_up_messages(Engine& engine) {
  std::byte* const data = engine.scratch();
  engine.make_first_call([&](ncclComm_t comm) {
    ncclResult_t result = ncclGroupStart();
    const auto note = [&](ncclResult_t made) {
      if (made != ncclSuccess && made != ncclInProgress) result = made;
    };
    for (int peer = 0; peer < static_cast<int>(engine.world()); ++peer) {
      if (peer == static_cast<int>(engine.rank().value())) continue;
      note(ncclSend(data, 1, ncclUint8, peer, comm, engine.stream()));
      note(ncclRecv(data + 1 + peer, 1, ncclUint8, peer, comm, engine.stream()));
    }
    const ncclResult_t ended = ncclGroupEnd();
    return result == ncclSuccess ? ended : result;
  });
}

}  // namespace lockstep::detail::nccl
