// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file One rank's end of a world of threads: its part in their calls, its GPU, and the events
/// that order its compute stream with the communication.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/threads/lanes.cuh"
#include "lockstep/comm/backends/threads/meeting.hpp"
#include "lockstep/comm/backends/threads/world.cuh"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/device_memory.cuh"
#include "lockstep/core/error.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/stream.cuh"
#include "lockstep/launch/outcome.hpp"

namespace lockstep::detail::threads {

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

/// Looks at the arguments of one rank's calls. CUDA is asked once for each argument; where GPUs use
/// each other's memory, the driver is asked once more.
class MemoryCheck {
 public:
  MemoryCheck(const Lanes& lanes, const Gpu& gpu, Rank rank)
      : lanes_(lanes), gpu_(gpu), rank_(rank) {}

  /// Memory that not all GPUs can reach is an error.
  template <class C>
  CallMemory operator()(const C& call) const {
    return detail::memory_of(call, rank_, [&](const void* pointer, const char* argument) {
      return look(call, pointer, argument);
    });
  }

 private:
  template <class C>
  MemoryKind look(const C& call, const void* pointer, const char* argument) const {
    cudaPointerAttributes attributes{};
    check_cuda(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
    if (attributes.type == cudaMemoryTypeManaged) return MemoryKind::managed;
    if (attributes.type != cudaMemoryTypeDevice) return MemoryKind::host;
    if (attributes.device != gpu_.device()) [[unlikely]]
      refuse_foreign(call.call(), argument, attributes.device);
    if (!lanes_.is_one() && lanes_.staging() == nullptr)
      require_shared_pool(call.call(), argument, pool_of(pointer));
    return MemoryKind::device;
  }

  [[noreturn]] void refuse_foreign(const Call& call, const char* argument, int device) const {
    throw Error(
        call.text(),
        text({argument, " is memory of GPU ", device, ", and this rank's GPU is ", gpu_.device()}),
        "allocate it while the rank's GPU is the current one, or by the communicator's "
        "allocate",
        rank_);
  }

  void require_shared_pool(const Call& call, const char* argument, cudaMemPool_t pool) const {
    if (pool == nullptr) return;
    for (const Lane& lane : lanes_.all()) {
      cudaMemLocation location{};
      location.type = cudaMemLocationTypeDevice;
      location.id = device_of(lane.gpu);
      if (location.id == gpu_.device()) continue;
      cudaMemAccessFlags access{};
      check_cuda(cudaMemPoolGetAccess(&access, pool, &location), "cudaMemPoolGetAccess");
      if (access == cudaMemAccessFlagsProtReadWrite) continue;
      throw Error(
          call.text(),
          text({argument, " is memory of a pool that GPU ", location.id, " has no access to"}),
          "grant it by cudaMemPoolSetAccess, or give memory of the default pool, of "
          "cudaMalloc or of the communicator's allocate",
          rank_);
    }
  }

  const Lanes& lanes_;
  const Gpu& gpu_;
  Rank rank_;
};

class Member {
 public:
  /// **Ranks** all. **Host** blocks until all have come; the last has `joined()` called.
  template <class Joined>
  Member(const std::shared_ptr<SharedWorld>& world, Rank rank, const std::shared_ptr<Gpu>& gpu,
         Milliseconds timeout, const Joined& joined)
      : Member(world, rank, gpu, timeout, joined, OnGpu(gpu->index())) {}

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

  /// Where the arguments of a call are. Throws if a GPU that is to work on them cannot.
  template <class C>
  CallMemory memory_of(const C& call) const {
    return MemoryCheck(*world_->lanes, *gpu_, calls_->rank())(call);
  }

  /// **Host** blocks until all ranks have made the call and the last one has done `work(offers)`.
  template <class Work>
  void meet(const Call& call, const Offer& offer, const Work& work) {
    calls_->meet(call, offer, work);
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
          const CudaEvent& ready = ready_[ticket % ring];
          ready.record(stream());
          return Offer{in, out, ready.get(), false};
        },
        [&](std::span<const Offer> ranks, std::uint64_t ticket) {
          enqueue(*world_->lanes, ranks, ticket);
        });
  }

  /// **Host** blocks until all ranks have announced the call. **Stream** the compute stream waits
  /// for its end.
  void wait(std::uint64_t ticket, const Call& call) {
    calls_->wait(ticket, call);
    world_->lanes->block(stream(), ticket);
  }
  /// **Host** blocks until host code may use managed memory of the calls so far. In a capture it
  /// does not: the program synchronises after a replay.
  void settle_managed() {
    if (!is_capturing_) check_cuda(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
  }
  /// **Host** blocks until the GPUs have done all work of calls that was enqueued so far. In a
  /// capture none was.
  void finish_lanes() const noexcept {
    if (is_capturing_) return;
    for (const Lane& lane : world_->lanes->all())
      static_cast<void>(cudaStreamSynchronize(lane.stream));
  }
  bool test(std::uint64_t ticket) const {
    return calls_->is_done(ticket) && world_->lanes->test(ticket);
  }

  /// A call on host memory: the last rank runs `work(offers)`. **Host** blocks until it was done.
  template <class Work>
  void run_on_host(const Call& call, const void* in, void* out, const Work& work) {
    forbid_in_capture(call.text(), "works on host memory, which no graph can do");
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
    if (on_host) {
      forbid_in_capture(call.text(), "works on host memory, which no graph can do");
      world_->mail.send(*calls_, call, Offer{data, nullptr, nullptr, true}, to);
      return;
    }
    sent_.record(stream());
    void* const taken =
        world_->mail.send(*calls_, call, Offer{data, nullptr, sent_.get(), false}, to);
    check_cuda(cudaStreamWaitEvent(stream(), static_cast<cudaEvent_t>(taken), 0),
               "cudaStreamWaitEvent");
  }

  void receive(const Call& call, void* data, std::size_t bytes, bool on_host, Rank from) {
    if (on_host) forbid_in_capture(call.text(), "works on host memory, which no graph can do");
    world_->mail.receive(*calls_, call, on_host, from, [&](const Offer& sent) -> void* {
      if (on_host) {
        if (bytes != 0) std::memcpy(data, sent.in, bytes);
        return nullptr;
      }
      check_cuda(cudaStreamWaitEvent(stream(), static_cast<cudaEvent_t>(sent.event), 0),
                 "cudaStreamWaitEvent");
      const Staging* const staging = world_->lanes->staging();
      if (staging != nullptr && &world_->lanes->of(from) != &world_->lanes->of(rank())) {
        pass_through_host(*staging, static_cast<std::byte*>(data), sent, bytes, from);
      } else {
        check_cuda(cudaMemcpyAsync(data, sent.in, bytes, cudaMemcpyDefault, stream()),
                   "cudaMemcpyAsync");
      }
      received().record(stream());
      return received().get();
    });
  }

  // Capture

  /// See `ThreadCommunicator::capture`.
  template <class F>
  WorldStepGraph capture(F&& f) {
    Call call;
    call.kind = CollectiveKind::capture;
    forbid_in_capture(call.text(), "captures a step itself");
    calls_->raise_fault();
    settle();
    gate_->meet(call, Offer{nullptr, nullptr, mark_.get(), false},
                [&](std::span<const Offer> ranks) {
                  world_->capture.begin(world_->streams, *world_->lanes, ranks);
                });
    if (world_->capture.is_open()) {
      const std::optional<Failure> failure = attempt(std::forward<F>(f));
      gate_->meet(call, Offer{&failure, nullptr, mark_.get(), false},
                  [&](std::span<const Offer> ranks) { end_capture(ranks); });
    }
    return WorldStepGraph(world_->capture.graph());
  }

 private:
  const CudaEvent& received() const { return world_->received[rank().value()]; }

  /// Takes a message in pieces through the sender's slot of host memory. The sender waits
  /// meanwhile, and its stream may be used here. **Stream** both ranks' compute streams.
  void pass_through_host(const Staging& staging, std::byte* to, const Offer& sent,
                         std::size_t bytes, Rank from) {
    const cudaStream_t senders = world_->streams[from.value()];
    const auto sent_event = static_cast<cudaEvent_t>(sent.event);
    unsigned char* const slot = staging.message_of(from.value());
    const auto copy = [&](void* target, const void* source, std::size_t n, cudaStream_t on) {
      check_cuda(cudaMemcpyAsync(target, source, n, cudaMemcpyDefault, on), "cudaMemcpyAsync");
    };
    for (std::size_t first = 0; first < bytes; first += staging.bytes()) {
      const std::size_t n = std::min(staging.bytes(), bytes - first);
      {
        const OnGpu current(world_->lanes->of(from).gpu);
        if (first != 0) received().block(senders);
        copy(slot, static_cast<const std::byte*>(sent.in) + first, n, senders);
        check_cuda(cudaEventRecord(sent_event, senders), "cudaEventRecord");
      }
      check_cuda(cudaStreamWaitEvent(stream(), sent_event, 0), "cudaStreamWaitEvent");
      copy(to + first, slot, n, stream());
      received().record(stream());
    }
  }

  /// Events must be of the GPU whose streams they are recorded in, whichever the caller's is.
  template <class Joined>
  Member(const std::shared_ptr<SharedWorld>& world, Rank rank, const std::shared_ptr<Gpu>& gpu,
         Milliseconds timeout, const Joined& joined, const OnGpu&)
      : world_(world), gpu_(gpu), ready_(ring) {
    gate_.emplace(world_->gate, rank, timeout);
    calls_.emplace(world_->calls, rank, timeout);
    calls_->meet(Call{}, Offer{gpu_.get(), nullptr, nullptr, false},
                 [&](std::span<const Offer> ranks) {
                   joined();
                   world_->open(ranks);
                 });
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
    if (!reason.empty()) {
      world_->calls->restore();
      world_->mail.restore();
    }
    world_->capture.end(world_->streams, *world_->lanes, ranks, reason);
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
  std::vector<CudaEvent> ready_;  // when a call's memory may be used
  CudaEvent sent_;
  CudaEvent mark_;
  Call last_;  // the last call that was announced and not waited for at once
  bool is_capturing_ = false;
  std::optional<Participant> gate_;  // where ranks meet even after a fault
  std::optional<Participant> calls_;
};

}  // namespace lockstep::detail::threads
