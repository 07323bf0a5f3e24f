// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A world of threads and one rank's end of it: its part in their calls, its GPU, the events
/// that order its compute stream with the communication, and its steps in a capture.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/threads/lanes.cuh"
#include "lockstep/comm/backends/threads/meeting.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/rank_gpu.cuh"
#include "lockstep/core/error.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/runtime.cuh"
#include "lockstep/device/cuda/step_graph.cuh"
#include "lockstep/launch/outcome.hpp"

namespace lockstep::detail::threads {

/// What all ranks share.
struct SharedWorld {
  /// `most_staged`: see `Staging`.
  explicit SharedWorld(WorldSize size, std::size_t most_staged = most_staged_bytes)
      : calls(std::make_shared<Meeting>(size)),
        gate(std::make_shared<Meeting>(size)),
        most_staged(most_staged) {
    if (size.value() <= most_ranks) return;
    throw Error("Backend<Shm>", std::to_string(size.value()) + " ranks are threads of one process",
                "start at most " + std::to_string(most_ranks) + ", or use Backend<Nccl>");
  }

  /// The world of this name that not all ranks of this process have joined yet; the first rank that
  /// asks makes it.
  static std::shared_ptr<SharedWorld> named(const std::string& name, WorldSize size) {
    const std::lock_guard lock(open_mutex);
    std::weak_ptr<SharedWorld>& known = open_worlds[name];
    std::shared_ptr<SharedWorld> world = known.lock();
    if (!world) known = world = std::make_shared<SharedWorld>(size);
    world->name_ = name;
    return world;
  }

  /// All ranks have come, each with its GPU. The next world of this name is another one.
  void open(std::span<const Offer> ranks) {
    {
      const std::lock_guard lock(open_mutex);
      if (!name_.empty()) open_worlds.erase(name_);
    }
    std::vector<std::size_t> gpus;
    for (const Offer& rank : ranks) {
      const Gpu& gpu = *static_cast<const Gpu*>(rank.in);
      gpus.push_back(gpu.index());
      streams.push_back(gpu.stream());
      const OnGpu current(gpu.index());
      received.emplace_back();
    }
    lanes.emplace(gpus, most_staged);
  }

  // One thread begins and ends a capture for all ranks while the others wait; `ranks[r].event` is
  // an event of rank r's GPU. In CUDA's relaxed mode every thread may add to the capture and any
  // thread may end it. CUDA does not promise that several may add at once, so ranks take turns.

  void begin_capture(std::span<const Offer> ranks) {
    graph.reset();
    check_cuda(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeRelaxed),
               "cudaStreamBeginCapture");
    std::string reason;
    note(cudaEventRecord(event_of(ranks[0]), streams[0]), "cudaEventRecord", reason);
    for (cudaStream_t stream : std::span(streams).subspan(1)) {
      note(cudaStreamWaitEvent(stream, event_of(ranks[0]), 0), "cudaStreamWaitEvent", reason);
    }
    if (!reason.empty()) end_capture(ranks, reason);
  }

  /// Joins all streams to the first and makes the graph, or notes why there is none. Afterwards the
  /// streams may be used as before.
  void end_capture(std::span<const Offer> ranks, std::string reason) {
    const auto join = [&](cudaStream_t stream, cudaEvent_t event) {
      cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
      note(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing", reason);
      if (status != cudaStreamCaptureStatusActive) return;
      note(cudaEventRecord(event, stream), "cudaEventRecord", reason);
      note(cudaStreamWaitEvent(streams[0], event, 0), "cudaStreamWaitEvent", reason);
    };
    for (std::size_t r = 1; r < streams.size(); ++r) join(streams[r], event_of(ranks[r]));
    lanes->for_each_stream(join);
    cudaGraph_t captured = nullptr;
    note(cudaStreamEndCapture(streams[0], &captured), "cudaStreamEndCapture", reason);
    const OwnedGraph owned(captured);
    graph = reason.empty() ? instantiate(owned, lanes->all().front().stream)
                           : StepGraph(std::move(reason));
  }

  std::shared_ptr<Meeting> calls;
  std::shared_ptr<Meeting> gate;  // where ranks meet even after a fault
  std::size_t most_staged;
  std::optional<Lanes> lanes;
  std::vector<cudaStream_t> streams;  // every rank's compute stream
  /// When every rank has taken its last message: its sender may wait for that after it has left.
  std::vector<CudaEvent> received;
  std::mutex turns;                // to add to the capture
  std::optional<StepGraph> graph;  // of the last capture; nothing while one is open

 private:
  static cudaEvent_t event_of(const Offer& rank) { return static_cast<cudaEvent_t>(rank.event); }

  /// The first fault is the reason.
  static void note(cudaError_t error, const char* call, std::string& reason) {
    if (error == cudaSuccess) return;
    const std::string fault = capture_fault(error, call);
    if (reason.empty()) reason = fault;
  }

  std::string name_;  // empty where ranks did not ask for it by a name
  static inline std::mutex open_mutex;
  static inline std::map<std::string, std::weak_ptr<SharedWorld>> open_worlds;
};

/// The pool that `cudaMallocAsync` took memory from, null for other memory. Only the driver knows.
inline cudaMemPool_t pool_of(const void* pointer) {
  using Ask = CUresult(CUDAAPI*)(void*, CUpointer_attribute, CUdeviceptr);
  static const Ask ask = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    constexpr const char* name = "cuPointerGetAttribute";
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
    return error == cudaSuccess ? reinterpret_cast<Ask>(found) : nullptr;
  }();
  cudaMemPool_t pool = nullptr;
  if (ask == nullptr || ask(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
                            reinterpret_cast<CUdeviceptr>(pointer)) != CUDA_SUCCESS)
    return nullptr;
  return pool;
}

class Member {
 public:
  /// **Ranks** all. **Host** blocks until all have come.
  Member(const std::shared_ptr<SharedWorld>& world, Rank rank, const std::shared_ptr<Gpu>& gpu,
         Milliseconds timeout)
      : world_(world), gpu_(gpu), events_(gpu->events(ring + 2)) {
    const OnGpu current(gpu->index());
    gate_.emplace(world_->gate, rank, timeout);
    calls_.emplace(world_->calls, rank, timeout);
    calls_->meet(Call{}, Offer{gpu_.get(), nullptr, nullptr, false},
                 [&](std::span<const Offer> ranks) { world_->open(ranks); });
  }

  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  /// Memory is freed when no rank works on it or will.
  ~Member() {
    try {
      if (!scope_.is_failure() && !calls_->is_broken()) settle();
    } catch (const std::exception&) {  // a destructor does not throw
    }
    gate_.reset();
    calls_.reset();
    static_cast<void>(cudaStreamSynchronize(stream()));
    finish_lanes();
  }

  Rank rank() const { return calls_->rank(); }
  std::size_t world() const { return calls_->world(); }
  Participant& calls() { return *calls_; }
  const std::shared_ptr<Gpu>& gpu() const { return gpu_; }
  cudaStream_t stream() const { return gpu_->stream(); }
  void set_timeout(Milliseconds timeout) {
    calls_->set_timeout(timeout);
    gate_->set_timeout(timeout);
  }

  std::byte* allocate(std::size_t bytes) {
    const OnGpu current(gpu_->index());
    return arenas_.emplace_back(bytes).data();
  }

  /// Where the arguments of a call are. Throws if a GPU that is to work on them cannot. CUDA is
  /// asked once for each argument; where GPUs use each other's memory, the driver is asked once
  /// more.
  template <class C>
  CallMemory memory_of(const C& call) const {
    const bool is_shared = !lanes().is_one() && lanes().staging() == nullptr;
    return detail::memory_of(call, *gpu_, [&](const void* pointer, const char* argument) {
      const MemoryKind kind = memory_kind(pointer, *gpu_, call, argument);
      if (is_shared && kind == MemoryKind::device) require_access(call, argument, pool_of(pointer));
      return kind;
    });
  }

  // Calls

  /// Announces a call on device memory. The last rank runs `enqueue(lanes, offers, ticket)`.
  /// **Host** does not block, unless too many calls are under way.
  template <class Enqueue>
  std::uint64_t start(const Call& call, const void* in, void* out, const Enqueue& enqueue) {
    last_ = call;
    return calls_->announce(
        call,
        [&](std::uint64_t ticket) {
          const CudaEvent& ready = events_[ticket % ring];
          ready.record(stream());
          return Offer{in, out, ready.get(), false};
        },
        [&](std::span<const Offer> ranks, std::uint64_t ticket) {
          enqueue(lanes(), ranks, ticket);
        });
  }

  /// **Host** blocks until all ranks have announced the call. **Stream** the compute stream waits
  /// for its end.
  void wait(std::uint64_t ticket, const Call& call) {
    calls_->wait(ticket, call);
    lanes().block(stream(), ticket);
  }
  bool test(std::uint64_t ticket) const { return calls_->is_done(ticket) && lanes().test(ticket); }
  /// **Host** blocks until host code may use managed memory of the calls so far. In a capture it
  /// does not: the program synchronises after a replay.
  void settle_managed() {
    if (!is_capturing_) check_cuda(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
  }
  /// **Host** blocks until the GPUs have done all work of calls that was enqueued so far. In a
  /// capture none was.
  void finish_lanes() const noexcept {
    if (is_capturing_) return;
    for (const Lane& lane : lanes().all()) static_cast<void>(cudaStreamSynchronize(lane.stream));
  }

  /// A call on host memory: the last rank runs `work(offers)`. **Host** blocks until it was done.
  template <class Work>
  void run_on_host(const Call& call, const void* in, void* out, const Work& work) {
    forbid_in_capture(call.text(), on_host_memory);
    calls_->meet(call, Offer{in, out, nullptr, true}, work);
  }

  /// **Host** blocks until all ranks have announced every call that this rank has announced.
  void settle() {
    if (calls_->announced() > 0) calls_->wait(calls_->announced() - 1, last_);
  }

  void synchronize() {
    forbid_in_capture("synchronize", "waits for the stream on the host, which no graph can do");
    calls_->raise_fault();
    settle();
    check_cuda(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
  }

  // Messages

  void send(const Call& call, const void* data, bool on_host, Rank to) {
    if (on_host) forbid_in_capture(call.text(), on_host_memory);
    const CudaEvent& sent = events_[ring];
    if (!on_host) sent.record(stream());
    void* const taken =
        calls_->send(call, Offer{data, nullptr, on_host ? nullptr : sent.get(), on_host}, to);
    if (!on_host) follow(taken);
  }

  void receive(const Call& call, void* data, std::size_t bytes, bool on_host, Rank from) {
    if (on_host) forbid_in_capture(call.text(), on_host_memory);
    calls_->receive(call, on_host, from, [&](const Offer& sent) -> void* {
      if (on_host) {
        if (bytes != 0) std::memcpy(data, sent.in, bytes);
        return nullptr;
      }
      // Where GPUs cannot use each other's memory, CUDA copies through the host.
      follow(sent.event);
      check_cuda(cudaMemcpyAsync(data, sent.in, bytes, cudaMemcpyDefault, stream()),
                 "cudaMemcpyAsync");
      const CudaEvent& received = world_->received[rank().value()];
      received.record(stream());
      return received.get();
    });
  }

  // Capture

  /// See `ThreadCommunicator::capture`.
  template <class F>
  StepGraph capture(F&& f) {
    Call call;
    call.kind = CollectiveKind::capture;
    forbid_in_capture(call.text(), "captures a step itself");
    calls_->raise_fault();
    settle();
    const cudaEvent_t mark = events_[ring + 1].get();
    gate_->meet(call, Offer{nullptr, nullptr, mark, false},
                [&](std::span<const Offer> ranks) { world_->begin_capture(ranks); });
    if (!world_->graph) {
      const std::optional<Failure> failure = attempt(std::forward<F>(f));
      gate_->meet(call, Offer{&failure, nullptr, mark, false},
                  [&](std::span<const Offer> ranks) { end_capture(ranks); });
    }
    return *world_->graph;
  }

 private:
  static constexpr const char* on_host_memory = "works on host memory, which no graph can do";

  const Lanes& lanes() const { return *world_->lanes; }
  /// The compute stream waits for another rank's event.
  void follow(void* event) const {
    check_cuda(cudaStreamWaitEvent(stream(), static_cast<cudaEvent_t>(event), 0),
               "cudaStreamWaitEvent");
  }

  /// All GPUs must have access to the pool that memory is from.
  template <class C>
  void require_access(const C& call, const char* argument, cudaMemPool_t pool) const {
    if (pool == nullptr) return;
    for (const Lane& lane : lanes().all()) {
      cudaMemLocation location{};
      location.type = cudaMemLocationTypeDevice;
      location.id = device_of(lane.gpu);
      if (location.id == gpu_->device()) continue;
      cudaMemAccessFlags access{};
      check_cuda(cudaMemPoolGetAccess(&access, pool, &location), "cudaMemPoolGetAccess");
      if (access == cudaMemAccessFlagsProtReadWrite) continue;
      throw Error(
          call.call().text(),
          text({argument, " is memory of a pool that GPU ", location.id, " has no access to"}),
          "grant it by cudaMemPoolSetAccess, or give memory of the default pool, of "
          "cudaMalloc or of the communicator's allocate",
          rank());
    }
  }

  /// Adds this rank's step to the capture. If that fails, every rank's attempt does.
  template <class F>
  std::optional<Failure> attempt(F&& f) {
    const std::lock_guard turn(world_->turns);
    calls_->take_turns(&world_->turns);
    is_capturing_ = true;
    std::optional<Failure> failure;
    try {
      std::forward<F>(f)();
      settle();
    } catch (...) {
      failure = Failure::of(std::current_exception());
      static_cast<void>(cudaGetLastError());  // of launches into a capture that was over
      calls_->abandon(failure->text(rank()));
    }
    is_capturing_ = false;
    calls_->take_turns(nullptr);
    return failure;
  }

  /// All ranks have made their attempt. If one has failed, calls that only some ranks have
  /// announced are forgotten.
  void end_capture(std::span<const Offer> ranks) {
    std::string reason;
    bool only_consequences = true;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const auto& failure = *static_cast<const std::optional<Failure>*>(ranks[r].in);
      if (!failure || !only_consequences || (failure->consequence && !reason.empty())) continue;
      reason = failure->text(Rank{r});
      only_consequences = failure->consequence;
    }
    if (!reason.empty()) world_->calls->restore();
    world_->end_capture(ranks, reason);
  }

  void forbid_in_capture(const std::string& operation, const char* problem) const {
    if (!is_capturing_) return;
    throw Error(operation, std::string("a step that is being captured ") + problem,
                "do it outside the step", rank());
  }

  EndOfScope scope_;
  std::shared_ptr<SharedWorld> world_;
  std::shared_ptr<Gpu> gpu_;
  std::deque<DeviceArena> arenas_;
  /// When a call's memory may be used; when a message may be; and one for captures.
  std::vector<CudaEvent> events_;
  Call last_;  // the last call that was announced and not waited for at once
  bool is_capturing_ = false;
  std::optional<Participant> gate_;  // where ranks meet even after a fault
  std::optional<Participant> calls_;
};

}  // namespace lockstep::detail::threads
