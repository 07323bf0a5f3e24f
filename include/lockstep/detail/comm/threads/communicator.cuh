// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Shm>`'s communicator for `Device<Cuda>`: ranks are threads of one process.

#include <cuda.h>

#include <deque>

#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/comm/threads/device_collectives.cuh"
#include "lockstep/detail/device/cuda/step_graph.cuh"
#include "lockstep/detail/launch/outcome.hpp"
#include "lockstep/detail/topology/topology.hpp"

namespace lockstep::detail::threads {

using AllArguments = std::span<const CallArguments>;

struct SharedWorld {
  explicit SharedWorld(WorldSize size, std::size_t most_staged = most_staged_bytes)
      : calls(std::make_shared<Rendezvous>(size)),
        barrier(std::make_shared<Rendezvous>(size)),
        most_staged(most_staged) {
    if (size.value() <= most_ranks) return;
    fail("Backend<Shm>", {size, " ranks are threads of one process"},
         text({"start at most ", most_ranks, ", or use Backend<Nccl>"}));
  }

  /// The world of this name that not all ranks have joined yet; the first rank to ask creates it.
  static std::shared_ptr<SharedWorld> named(const std::string& name, WorldSize size) {
    const std::lock_guard lock(open_mutex);
    std::weak_ptr<SharedWorld>& known = open_worlds[name];
    std::shared_ptr<SharedWorld> world = known.lock();
    if (!world) known = world = std::make_shared<SharedWorld>(size);
    world->key = name;
    return world;
  }

  /// All ranks have joined, each with its GPU. The next world of this name is a new one.
  void open(AllArguments ranks) {
    {
      const std::lock_guard lock(open_mutex);
      if (!key.empty()) open_worlds.erase(key);
    }
    std::vector<std::size_t> gpus;
    for (const CallArguments& rank : ranks) {
      const Gpu& gpu = *static_cast<const Gpu*>(rank.in);
      gpus.push_back(gpu.index());
      streams.push_back(gpu.stream());
      const OnGpu current(gpu.index());
      received.emplace_back();
    }
    comm_streams.emplace(gpus, most_staged);
  }

  // One thread begins and ends a capture for all ranks; `ranks[r].event` is of rank r's GPU. CUDA's
  // relaxed mode lets any thread add to it, but maybe not several at once: ranks take turns.

  void begin_capture(AllArguments ranks) {
    graph.reset();
    check_cuda(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeRelaxed),
               "cudaStreamBeginCapture");
    try {
      const auto first = static_cast<cudaEvent_t>(ranks[0].event);
      check_cuda(cudaEventRecord(first, streams[0]), "cudaEventRecord");
      for (cudaStream_t stream : std::span(streams).subspan(1)) follow(stream, first);
    } catch (const Error& error) {
      end_capture(ranks, text({error.operation(), ": ", error.problem()}));
    }
  }

  /// Joins all streams and makes the graph, or records why there is none. Streams are usable again.
  void end_capture(AllArguments ranks, std::string reason) {
    const auto note = [&](cudaError_t error, const char* call) {
      if (error == cudaSuccess) return;
      const std::string fault = capture_fault(error, call);
      if (reason.empty()) reason = fault;
    };
    const auto join = [&](cudaStream_t stream, void* event) {
      cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
      note(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
      if (status != cudaStreamCaptureStatusActive) return;
      note(cudaEventRecord(static_cast<cudaEvent_t>(event), stream), "cudaEventRecord");
      note(cudaStreamWaitEvent(streams[0], static_cast<cudaEvent_t>(event), 0),
           "cudaStreamWaitEvent");
    };
    for (std::size_t r = 1; r < streams.size(); ++r) join(streams[r], ranks[r].event);
    comm_streams->for_each_stream(join);
    cudaGraph_t captured = nullptr;
    note(cudaStreamEndCapture(streams[0], &captured), "cudaStreamEndCapture");
    const OwnedGraph owned(captured);
    graph = reason.empty() ? instantiate(owned, comm_streams->all().front().stream)
                           : StepGraph(std::move(reason));
  }

  std::shared_ptr<Rendezvous> calls;
  std::shared_ptr<Rendezvous> barrier;  // a barrier that works even after a fault
  std::size_t most_staged;
  std::optional<CommStreams> comm_streams;
  std::vector<cudaStream_t> streams;  // every rank's compute stream
  /// Event r: rank r has received its last message. Senders may wait for it after rank r has left.
  std::vector<CudaEvent> received;
  std::mutex turns;                // guards additions to the capture
  std::optional<StepGraph> graph;  // of the last capture; empty while one is open

  std::string key;  // among the open worlds; empty for others
  static inline std::mutex open_mutex;
  static inline std::map<std::string, std::weak_ptr<SharedWorld>> open_worlds;
};

/// The pool of memory from `cudaMallocAsync`, else null. Only the driver API reports it.
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

/// One rank's end of a world: its calls, its GPU, and its part of captures.
class Member : public RankHandle {
 public:
  /// **Ranks** all. **Host** blocks until all have joined.
  Member(const std::shared_ptr<SharedWorld>& world, const GroupMember& member,
         const std::shared_ptr<Gpu>& gpu, Milliseconds timeout)
      : RankHandle(world->calls, member, timeout),
        world_(world),
        gpu_(gpu),
        events_(gpu->events(ring + 2)) {
    const OnGpu current(gpu->index());
    GroupMember at_barrier = member;
    at_barrier.group += ", captures";
    barrier_.emplace(world_->barrier, at_barrier, timeout);
    rendezvous(Call{}, CallArguments{gpu_.get(), nullptr, nullptr, false},
               [&](AllArguments ranks) { world_->open(ranks); });
  }
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  /// Frees memory when no rank uses it or will.
  ~Member() {
    try {
      if (!scope_.is_failure() && !is_broken()) wait_for_announced();
    } catch (const std::exception&) {  // a destructor must not throw
    }
    barrier_.reset();
    leave();
    static_cast<void>(cudaStreamSynchronize(stream()));
    finish_streams();
  }

  const std::shared_ptr<Gpu>& gpu() const { return gpu_; }
  cudaStream_t stream() const { return gpu_->stream(); }
  const CommStreams& comm_streams() const { return *world_->comm_streams; }
  void set_timeout(Milliseconds timeout) {
    RankHandle::set_timeout(timeout);
    barrier_->set_timeout(timeout);
  }

  std::byte* allocate(std::size_t bytes) {
    const OnGpu current(gpu_->index());
    return arenas_.emplace_back(bytes).data();
  }

  /// The memory of a call's arguments; throws if a GPU that is to use them cannot.
  template <class C>
  CallMemory memory_of(const C& call) const {
    const bool is_shared = !comm_streams().is_one() && !comm_streams().is_staged();
    return detail::memory_of(call, *gpu_, [&](const void* pointer, const char* argument) {
      const MemoryKind kind = memory_kind(pointer, *gpu_, call, argument);
      if (is_shared && kind == MemoryKind::device)
        require_access(call.call(), argument, pool_of(pointer));
      return kind;
    });
  }

  /// Announces a call; the last rank runs `enqueue`. **Host** blocks if too many are in flight.
  template <class Enqueue>
  std::uint64_t start(const Call& call, const void* in, void* out, const Enqueue& enqueue) {
    last_ = call;
    const auto bring = [&](std::uint64_t ticket) {
      const CudaEvent& ready = events_[ticket % ring];
      ready.record(stream());
      return CallArguments{in, out, ready.get(), false};
    };
    return announce(call, bring, enqueue);
  }

  /// **Host** blocks until all ranks have announced the call. **Stream** the compute stream waits.
  void complete(std::uint64_t ticket, const Call& call) {
    wait(ticket, call);
    comm_streams().block(stream(), ticket);
  }
  bool test(std::uint64_t ticket, const Call& call) {
    return RankHandle::test(ticket, call) && comm_streams().test(ticket);
  }
  /// **Host** blocks until host code may access managed memory; not in a capture.
  void wait_for_host_access() {
    if (!is_capturing_) check_cuda(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
  }
  /// **Host** blocks until the GPUs have completed all enqueued calls. A capture has enqueued none.
  void finish_streams() const noexcept {
    if (is_capturing_) return;
    for (const CommStream& comm_stream : comm_streams().all())
      static_cast<void>(cudaStreamSynchronize(comm_stream.stream));
  }
  /// **Host** blocks until all ranks have announced every call that this rank has announced.
  void wait_for_announced() {
    if (announced() > 0) wait(announced() - 1, last_);
  }

  void synchronize() {
    forbid_in_capture("synchronize", "waits for the stream on the host, which no graph can do");
    raise_fault();
    wait_for_announced();
    check_cuda(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
  }

  template <class C>
  void exchange(const C& message) {
    const Call call = message.call();
    const CallMemory memory = memory_of(message);
    const bool on_host = memory.on_host;
    if (on_host) forbid_on_host(call);
    if constexpr (C::kind == CollectiveKind::send) {
      const CudaEvent& sent = events_[ring];
      if (!on_host) sent.record(stream());
      const CallArguments arguments{message.in.data(), nullptr, on_host ? nullptr : sent.get(),
                                    on_host};
      void* const taken = send(call, arguments, message.root);
      if (!on_host) follow(stream(), taken);
    } else {
      receive(call, on_host, message.root, [&](const CallArguments& sent) -> void* {
        const std::size_t bytes = message.out.size_bytes();
        if (on_host) {
          if (bytes != 0) std::memcpy(message.out.data(), sent.in, bytes);
          return nullptr;
        }
        // Without peer access, CUDA copies through the host.
        follow(stream(), sent.event);
        copy_async(message.out.data(), sent.in, bytes, stream());
        const CudaEvent& received = world_->received[rank().value()];
        received.record(stream());
        return received.get();
      });
    }
    if (memory.is_managed) wait_for_host_access();
  }

  template <class F>
  StepGraph capture(F&& f) {
    const Call call{CollectiveKind::capture};
    forbid_in_capture(call.text(), "captures a step itself");
    raise_fault();
    wait_for_announced();
    const cudaEvent_t mark = events_[ring + 1].get();
    barrier_->rendezvous(call, CallArguments{nullptr, nullptr, mark, false},
                         [&](AllArguments ranks) { world_->begin_capture(ranks); });
    if (!world_->graph) {
      const std::optional<Error> failure = attempt(std::forward<F>(f));
      barrier_->rendezvous(call, CallArguments{&failure, nullptr, mark, false},
                           [&](AllArguments ranks) { end_capture(ranks); });
    }
    return *world_->graph;
  }

  void forbid_in_capture(const std::string& operation, const char* problem) const {
    if (!is_capturing_) return;
    detail::fail(operation, {"a step that is being captured ", problem}, "do it outside the step",
                 rank());
  }
  void forbid_on_host(const Call& call) const {
    if (is_capturing_)
      forbid_in_capture(call.text(), "works on host memory, which no graph can do");
  }

 private:
  /// Throws unless all GPUs have access to the memory's pool.
  void require_access(const Call& call, const char* argument, cudaMemPool_t pool) const {
    if (pool == nullptr) return;
    for (const CommStream& comm_stream : comm_streams().all()) {
      cudaMemLocation location{};
      location.type = cudaMemLocationTypeDevice;
      location.id = device_of(comm_stream.gpu);
      if (location.id == gpu_->device()) continue;
      cudaMemAccessFlags access{};
      check_cuda(cudaMemPoolGetAccess(&access, pool, &location), "cudaMemPoolGetAccess");
      if (access == cudaMemAccessFlagsProtReadWrite) continue;
      detail::fail(call.text(),
                   {argument, " is memory of a pool that GPU ", location.id, " has no access to"},
                   "grant it by cudaMemPoolSetAccess, or give memory of the default pool, of "
                   "cudaMalloc or of the communicator's allocate",
                   rank());
    }
  }

  /// Adds this rank's step to the capture. If that fails, it fails on every rank.
  template <class F>
  std::optional<Error> attempt(F&& f) {
    const std::lock_guard turn(world_->turns);
    take_turns(&world_->turns);
    is_capturing_ = true;
    std::optional<Error> failure;
    try {
      std::forward<F>(f)();
      wait_for_announced();
    } catch (...) {
      failure.emplace(error_of(std::current_exception()));
      static_cast<void>(cudaGetLastError());  // of launches into a capture that has ended
      abort(with_rank(*failure, rank()).what());
    }
    is_capturing_ = false;
    take_turns(nullptr);
    return failure;
  }

  /// If an attempt has failed, calls that only some ranks have announced are dropped.
  void end_capture(AllArguments ranks) {
    std::string reason;
    bool only_consequences = true;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const auto& failure = *static_cast<const std::optional<Error>*>(ranks[r].in);
      if (!failure || !only_consequences || (failure->is_consequence() && !reason.empty()))
        continue;
      reason = with_rank(*failure, Rank{r}).what();
      only_consequences = failure->is_consequence();
    }
    if (!reason.empty()) world_->calls->restore();
    world_->end_capture(ranks, reason);
  }

  EndOfScope scope_;
  std::shared_ptr<SharedWorld> world_;
  std::shared_ptr<Gpu> gpu_;
  std::deque<DeviceArena> arenas_;
  std::vector<CudaEvent> events_;  // `ring` for calls, one for messages, one for captures
  Call last_;                      // the last call of `start`
  bool is_capturing_ = false;
  std::optional<RankHandle> barrier_;  // a barrier that works even after a fault
};

}  // namespace lockstep::detail::threads

namespace lockstep {

/// Collectives of threads. Reductions are unrolled over `Ranks`, the world's size if it is static.
///
/// The last rank to make a call enqueues the work of all ranks, on one stream per GPU. One kernel
/// loads from all ranks' memory, combines in rank order and stores to all ranks' memory: through
/// peer access to other GPUs, or in pieces through pinned host memory without it. Streams wait for
/// events; no kernel waits for another. Results are bitwise the same on all ranks and in every run.
///
/// Calls are compared before any launch. All ranks give any device memory, or all host memory.
///
/// **Host** collectives block until all ranks have made the call; with host memory, until the
/// result is complete. An asynchronous call on device memory does not block. **Stream** the work
/// runs after what all ranks' compute streams hold at the call; work enqueued later on this rank's
/// compute stream sees the result, for an asynchronous call after `wait` of its handle.
template <std::size_t Ranks = dynamic>
class ThreadCommunicator : public Collectives<ThreadCommunicator<Ranks>> {
  using Member = detail::threads::Member;
  using SharedWorld = detail::threads::SharedWorld;
  using CallArguments = detail::threads::CallArguments;
  using AllArguments = detail::threads::AllArguments;

 public:
  /// With this many calls in flight, a new one blocks until all ranks have made the oldest.
  static constexpr std::size_t most_in_flight = detail::threads::ring;
  static constexpr bool captures_jointly = true;

  ThreadCommunicator(const std::shared_ptr<SharedWorld>& world, const detail::GroupMember& member,
                     const std::shared_ptr<Gpu>& gpu, std::chrono::milliseconds timeout) {
    detail::require_world<Ranks>(WorldSize{world->calls->world()}, member.rank);
    member_ = std::make_unique<Member>(world, member, gpu, timeout);
  }
  /// A rank of a job of its own.
  ThreadCommunicator(const std::shared_ptr<SharedWorld>& world, Rank rank,
                     const std::shared_ptr<Gpu>& gpu, std::chrono::milliseconds timeout)
      : ThreadCommunicator(
            world, detail::GroupMember{"world", rank, WorldSize{world->calls->world()}, rank}, gpu,
            timeout) {}
  ThreadCommunicator(ThreadCommunicator&&) noexcept = default;
  ThreadCommunicator& operator=(ThreadCommunicator&&) = delete;

  /// Joins `name`, of this process's threads. **Ranks** all. **Host** blocks until all have joined.
  static ThreadCommunicator join(const Membership& member, Store& store,
                                 const std::shared_ptr<Gpu>& gpu,
                                 const std::string& name = "world") {
    detail::require_world<Ranks>(member.world, member.rank);
    // A rank that fails before this closes the store, so that no rank waits for it in vain.
    store.barrier("lockstep/threads/" + name, member.rank, member.world, member.timeout);
    return {SharedWorld::named(member.job + " " + name, member.world),
            detail::group_member(member, name), gpu, member.timeout};
  }

  Rank rank() const { return member_->rank(); }
  WorldSize world_size() const { return WorldSize{Ranks == dynamic ? member_->world() : Ranks}; }
  Gpu& gpu() const { return *member_->gpu(); }
  std::chrono::milliseconds timeout() const { return member_->timeout(); }
  void set_timeout(std::chrono::milliseconds timeout) { member_->set_timeout(timeout); }

  /// `count` zeroed elements on this rank's GPU, freed with the communicator. **Ranks** this one.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    return {reinterpret_cast<T*>(member_->allocate(count * sizeof(T))), count};
  }

  /// Aborts: every other rank's calls fail with this reason. **Ranks** this one.
  void abort(std::string_view reason) { member_->abort(reason); }

  /// **Ranks** this one. **Host** blocks until its stream is idle and all have made its calls.
  void synchronize() { member_->synchronize(); }

  /// **Ranks** all. **Host** blocks until all ranks have made the call. **Stream** work enqueued
  /// later on any rank's compute stream runs after what all of them hold at the call.
  void order_streams() {
    if (is_alone()) return;
    const detail::Call call;
    const auto enqueue = [&](AllArguments ranks, std::uint64_t ticket) {
      member_->comm_streams().run(ranks, ticket, [] {});
    };
    member_->complete(member_->start(call, nullptr, nullptr, enqueue), call);
  }

  /// Captures the work that `f` enqueues on the compute streams of all ranks, collectives included,
  /// as one graph. If that fails on any rank, no rank gets a graph, and the result holds the
  /// reason. **Ranks** all; they run `f` by turns. **Host** runs `f`. **Stream** nothing runs.
  template <class F>
  detail::StepGraph capture(F&& f) {
    return member_->capture(std::forward<F>(f));
  }

  /// Runs a captured step. **Ranks** all, with the graph of the same capture.
  void replay(const detail::StepGraph& graph) {
    if (is_alone() || !graph) {  // without a graph, the launch throws the reason
      member_->raise_fault();
      graph.launch(gpu().stream());
      return;
    }
    const detail::Call call{detail::CollectiveKind::replay,
                            detail::step_call_of_thread(detail::JobCall::none)};
    const auto enqueue = [&](AllArguments ranks, std::uint64_t ticket) {
      for (const CallArguments& other : ranks) {
        if (other.in == ranks[0].in) continue;
        throw Error(call.text(), "ranks replay steps of different captures",
                    "let every rank replay the same one", rank());
      }
      // The graph may use the memory of all communication streams: it runs after what they hold.
      const detail::threads::CommStreams& comm_streams = member_->comm_streams();
      comm_streams.run(ranks, ticket, [&] {
        comm_streams.barrier();
        const detail::OnGpu current(comm_streams.all().front().gpu);
        graph.launch(comm_streams.all().front().stream);
      });
    };
    member_->complete(member_->start(call, graph.executable().get(), nullptr, enqueue), call);
  }

  template <class C>
  void perform(const C& call) {
    if constexpr (C::is_message) {
      member_->exchange(call);
    } else if constexpr (C::kind == detail::CollectiveKind::barrier) {
      member_->synchronize();
      agree(call.call());
    } else {
      start(call).wait();
    }
  }

  void agree(const detail::Call& call) {
    member_->rendezvous(call, CallArguments{}, [](AllArguments) {});
  }

  /// Calls on host memory complete before this returns.
  template <class C>
  auto start(const C& call) {
    const detail::Call described = call.call();
    const detail::CallMemory memory = member_->memory_of(call);
    std::optional<std::uint64_t> ticket;
    if (memory.on_host) {
      if (memory.is_managed) member_->wait_for_host_access();  // kernels may still write the memory
      member_->forbid_on_host(described);
      member_->rendezvous(described, CallArguments{call.in.data(), call.out.data(), nullptr, true},
                          [&](AllArguments ranks) { detail::threads::work_for_all(call, ranks); });
    } else if (is_alone()) {
      member_->raise_fault();
      detail::perform_alone(passes(), call);
      if (memory.is_managed) member_->wait_for_host_access();
    } else {
      ticket = member_->start(described, call.in.data(), call.out.data(),
                              [&](AllArguments ranks, std::uint64_t number) {
                                detail::threads::enqueue<Ranks>(call, member_->comm_streams(),
                                                                ranks, number);
                              });
    }
    return Work<Pending>(std::in_place, *member_, ticket, described, memory.is_managed);
  }

  /// The communicator of this rank's group, if it is in one.
  template <std::size_t GroupRanks>
  std::optional<ThreadCommunicator<GroupRanks>> split(const detail::GroupPosition& position) {
    using World = std::shared_ptr<SharedWorld>;
    World world;  // made by the group's leader
    const std::string name = member_->next_group_name(position.group);
    if (position.is_member() && position.rank == Rank{0})
      world = std::make_shared<SharedWorld>(position.world());
    member_->rendezvous(detail::division_call(position), {&position, &world, nullptr, true},
                        [](AllArguments ranks) {
                          for (const CallArguments& rank : ranks) {
                            const auto& own = *static_cast<const detail::GroupPosition*>(rank.in);
                            if (!own.is_member()) continue;
                            *static_cast<World*>(rank.out) =
                                *static_cast<World*>(ranks[own.leader().value()].out);
                          }
                        });
    if (!position.is_member()) return std::nullopt;
    const Rank job_rank = member_->recorder().member().job_rank;
    return std::optional<ThreadCommunicator<GroupRanks>>(
        std::in_place, std::move(world),
        detail::GroupMember{name, position.rank, position.world(), job_rank}, member_->gpu(),
        timeout());
  }

  detail::StreamPasses passes() const { return detail::StreamPasses(gpu().stream()); }

 private:
  /// A world of one needs no stream but its compute stream.
  bool is_alone() const { return world_size() == WorldSize{1}; }

  /// A call in flight; without a ticket, it has completed.
  struct Pending {
    Member& member;
    std::optional<std::uint64_t> ticket;
    detail::Call call;
    bool is_managed;

    bool test() { return !ticket || member.test(*ticket, call); }
    void wait() {
      if (!ticket) return;
      member.complete(*ticket, call);
      if (is_managed) member.wait_for_host_access();
    }
    /// Returns when no rank or GPU uses this rank's memory any more or will.
    void leave() {
      if (!ticket) return;
      if (!member.is_done(*ticket)) member.abort(detail::ended_by_exception);
      member.finish_streams();
    }
  };

  std::unique_ptr<Member> member_;
};

/// Joins a job's communicator with the GPU of this rank's local rank. All ranks must be threads of
/// this process. **Ranks** all. **Host** blocks until all have joined.
template <std::size_t Ranks = dynamic>
ThreadCommunicator<Ranks> make_thread_communicator(const Membership& member, Store& store,
                                                   const std::string& name = "world") {
  if (member.local_world != member.world.value()) {
    detail::fail(
        "Backend<Shm>",
        {"of the job's ", member.world, " ranks, ", member.local_world, " are on this host"},
        detail::text({"with Device<Cuda> its ranks are threads of one process: start it "
                      "once, with --ranks ",
                      member.world}),
        member.rank);
  }
  return ThreadCommunicator<Ranks>::join(member, store, detail::gpu_of(member), name);
}

}  // namespace lockstep
