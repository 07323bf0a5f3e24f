// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Nccl>`'s communicator: collectives of ranks that have a GPU each.

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/nccl/sharing.cuh"
#include "lockstep/comm/backends/nccl/transport.cuh"
#include "lockstep/comm/backends/nccl/watch.cuh"
#include "lockstep/comm/collectives.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/group_place.hpp"
#include "lockstep/comm/objects.hpp"
#include "lockstep/comm/passes.cuh"
#include "lockstep/comm/rank_gpu.cuh"
#include "lockstep/comm/work.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/step_graph.cuh"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/numbered_meeting.hpp"
#include "lockstep/launch/store.hpp"
#include "lockstep/topology/world.hpp"

namespace lockstep {

/// Collectives through NCCL. Reductions are its own, averages and pre-multiplied sums included;
/// those that it lacks (16-bit integers, bit operations, minima that keep a NaN) are made of
/// gathered elements, in rank order. Sums of 16-bit floats are rounded at every step, as NCCL does
/// it.
///
/// A thread watches every communicator. A call that is not over at the time limit, a rank that
/// fails, and ranks that make different calls are noticed, and end the communicator on all ranks
/// with one error, which every call throws from then on. Nothing hangs.
///
/// **Host** no collective blocks for device memory, except `barrier`; host memory is staged, and
/// the host blocks until the result is here: it is meant for small control data. **Stream** a call
/// comes after what the compute stream `gpu().stream()` holds, and what that is given afterwards
/// sees the result; after an asynchronous call, what it is given after `wait` of the handle.
template <std::size_t Ranks = dynamic>
class NcclCommunicator : public Collectives<NcclCommunicator<Ranks>> {
  using Engine = detail::nccl::Engine;
  using Ticket = detail::nccl::Ticket;

 public:
  using Milliseconds = std::chrono::milliseconds;

  /// With more calls under way than this, a new one waits for the oldest on the host.
  static constexpr std::size_t most_under_way = detail::nccl::UnderWay::most;

  /// Joins the job's communicator of this name, on the GPU that is this rank's. **Ranks** all.
  /// **Host** blocks until all have come.
  NcclCommunicator(const Membership& member, Store& store, const std::string& name = "world")
      : NcclCommunicator(member, store, name, detail::gpu_of(member)) {}
  /// Joins with a GPU and a compute stream of the caller's choice.
  NcclCommunicator(const Membership& member, Store& store, const std::string& name,
                   std::shared_ptr<Gpu> gpu)
      : engine_(join(member, store, name, std::move(gpu))) {}
  /// The communicator of a group, made by `split`.
  explicit NcclCommunicator(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  NcclCommunicator(NcclCommunicator&&) noexcept = default;
  NcclCommunicator& operator=(NcclCommunicator&&) = delete;

  Rank rank() const { return engine_->rank(); }
  WorldSize world_size() const { return WorldSize{engine_->world()}; }
  Gpu& gpu() const { return engine_->gpu(); }
  Milliseconds timeout() const { return engine_->timeout(); }
  void set_timeout(Milliseconds timeout) { engine_->set_timeout(timeout); }

  /// `count` zeroed elements of device memory that is registered with NCCL. It lives as long as the
  /// communicator. **Ranks** any. **Host** blocks.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    return {reinterpret_cast<T*>(engine_->allocate(count * sizeof(T))), count};
  }

  /// Gives up: every other rank's call fails with this reason, and the communicator ends.
  void abandon(std::string_view reason) {
    engine_->link().fail(detail::gave_up("NCCL's communicator '" + engine_->joined().name + "'",
                                         std::string(reason), rank()),
                         reason);
  }

  /// **Ranks** this one. **Host** blocks until the compute stream is empty, and throws what went
  /// wrong.
  void synchronize() { engine_->synchronize(); }

  /// **Ranks** this one. Throws the fault, if there is one.
  void raise_fault() { engine_->raise_fault(); }

  /// Captures the step that `f()` puts on the compute stream, collectives included, without running
  /// it. If that fails on any rank, no rank gets a graph, and each is told why. Run the step once
  /// before: what is set up at first use cannot be captured. **Ranks** all. **Host** blocks.
  template <class F>
  detail::StepGraph capture(F&& f) {
    engine_->raise_fault();
    detail::StepGraph graph = agreed(detail::capture_stream(gpu().stream(), std::forward<F>(f)));
    engine_->adopt(graph);
    return graph;
  }

  /// Runs a captured step. The graph must not be used after the communicator's end. **Ranks** all.
  /// **Host** does not block. **Stream** after what the compute stream holds, and before what it is
  /// given next.
  void replay(const detail::StepGraph& graph) { engine_->replay(graph); }

  // For the front and for adapters.

  template <class C>
  void perform(const C& call) {
    if constexpr (C::kind == detail::CollectiveKind::barrier) {
      // The barrier is an all-reduce: it is over when every rank's stream has come to it.
      std::uint8_t token[] = {0};
      const detail::calls::AllReduce<std::uint8_t, Sum> meeting{token, token, 1};
      post(call.call(), meeting);
    } else {
      engine_->order(post(call.call(), call));
    }
  }

  /// **Host** does not block: ranks compare their calls in the background.
  void agree(const detail::Call& call) {
    engine_->post(call, [] {});
  }

  template <class C>
  auto start(const C& call) {
    return Work<Pending>(std::in_place, *engine_, post(call.call(), call));
  }

  /// The communicator of this rank's group, if it is in one. Groups share their parent's GPU and
  /// compute stream. **Host** blocks until NCCL is done.
  template <std::size_t GroupRanks>
  std::optional<NcclCommunicator<GroupRanks>> split(const detail::GroupPlace& place) {
    const int colour = place.is_member() ? static_cast<int>(place.group) : NCCL_SPLIT_NOCOLOR;
    const std::string name = engine_->next_group_name() + "." + std::to_string(colour);
    engine_->post(detail::division_call(place), [&] {
      engine_->split_result() = nullptr;
      engine_->link().nccl("ncclCommSplit", [&](ncclComm_t comm) {
        return ncclCommSplit(comm, colour, static_cast<int>(place.rank.value()),
                             &engine_->split_result(), nullptr);
      });
    });
    if (!place.is_member()) return std::nullopt;
    auto group = std::make_shared<Engine>(
        detail::nccl::JoinOptions{place.rank, place.world(), name, engine_->joined().gpu,
                                  engine_->joined().store, engine_->timeout()});
    group->connect([&](ncclComm_t* comm) {
      *comm = std::exchange(engine_->split_result(), nullptr);
      return ncclSuccess;
    });
    return std::optional<NcclCommunicator<GroupRanks>>(std::in_place, std::move(group));
  }

  /// A further communicator, of ranks of the job that need not be in this one, on the same GPU and
  /// compute stream. No other of the job has its name. **Ranks** its members. **Host** blocks until
  /// all have come.
  NcclCommunicator<> among(const std::string& name, Rank rank, WorldSize world) const {
    Membership member;
    member.rank = rank;
    member.world = world;
    member.timeout = timeout();
    const std::shared_ptr<Store>& store = engine_->joined().store;
    return NcclCommunicator<>(connect(member, *store, name, engine_->joined().gpu, store));
  }

  detail::StreamPasses passes() const { return detail::StreamPasses(gpu().stream()); }

 private:
  struct Pending {
    Engine& engine;
    Ticket ticket;

    bool test() { return engine.test(ticket); }
    void wait() { engine.order(ticket); }
    /// The work on the stream runs to its end; its memory belongs to the communicator.
    static constexpr void leave() {}
  };

  /// Puts a call on the stream. `described` is how the log and errors name it.
  template <class C>
  Ticket post(const detail::Call& described, const C& call) {
    if (call.count == 0) return engine_->post(described, [] {});
    if (is_host(call.in) || is_host(call.out)) return post_staged(described, call);
    return engine_->post(described, [&] { execute(described, call); });
  }

  template <class C>
  void execute(const detail::Call& described, const C& call) {
    detail::nccl::Transport transport(*engine_, described);
    detail::execute_any(transport, call);
  }

  template <class T>
  static bool is_host(std::span<T> values) {
    return !values.empty() && detail::is_host_memory(values.data());
  }

  /// A call with host memory goes through device memory, and is waited for.
  template <class C>
  Ticket post_staged(const detail::Call& described, const C& call) {
    using T = typename C::element;
    engine_->require_no_capture(described, "give it device memory, or do it outside of the step");
    const bool in_staged = is_host(call.in);
    const bool out_staged = is_host(call.out);
    const std::size_t out_begin = in_staged ? detail::align_up(call.in.size_bytes()) : 0;
    engine_->staging().reserve(out_begin + call.out.size_bytes());
    std::byte* const host = engine_->staging().host();
    std::byte* const device = engine_->staging().device();
    const T* const in = in_staged ? reinterpret_cast<const T*>(device) : call.in.data();
    T* const out = out_staged ? reinterpret_cast<T*>(device + out_begin) : call.out.data();
    if (in_staged) std::memcpy(host, call.in.data(), call.in.size_bytes());
    const Ticket ticket = engine_->post(described, [&] {
      if (in_staged) engine_->copy(device, host, call.in.size_bytes(), cudaMemcpyHostToDevice);
      execute(described, call.on({in, call.in.size()}, {out, call.out.size()}, call.count));
      if (out_staged)
        engine_->copy(host + out_begin, out, call.out.size_bytes(), cudaMemcpyDeviceToHost);
    });
    engine_->wait(ticket);
    if (out_staged) std::memcpy(call.out.data(), host + out_begin, call.out.size_bytes());
    return ticket;
  }

  static std::shared_ptr<Engine> join(const Membership& member, Store& store,
                                      const std::string& called, std::shared_ptr<Gpu> gpu) {
    detail::require_world<Ranks>(member.world, member.rank);
    return connect(member, store, detail::numbered_meeting(store, member.rank, "nccl", called),
                   std::move(gpu), std::make_shared<Store>(store.share()));
  }

  /// Joins through `store`; the communicator leaves its notices in `own_store`.
  static std::shared_ptr<Engine> connect(const Membership& member, Store& store,
                                         const std::string& name, std::shared_ptr<Gpu> gpu,
                                         std::shared_ptr<Store> own_store) {
    const bool alone = member.world == WorldSize{1};
    if (!alone) detail::nccl::settle_hosts(member, store, *gpu, name);
    const ncclUniqueId id = meet(member, store, name);
    auto engine = std::make_shared<Engine>(detail::nccl::JoinOptions{
        member.rank, member.world, name, std::move(gpu), std::move(own_store), member.timeout});
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    engine->connect([&](ncclComm_t* comm) {
      return ncclCommInitRankConfig(comm, static_cast<int>(member.world.value()), id,
                                    static_cast<int>(member.rank.value()), &config);
    });
    return engine;
  }

  /// Rank 0 makes NCCL's meeting point and tells the others through the store.
  static ncclUniqueId meet(const Membership& member, Store& store, const std::string& name) {
    const std::string key = "lockstep/nccl/" + name + "/id";
    ncclUniqueId id{};
    if (member.rank == Rank{0}) {
      detail::check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
      store.set(key, std::string_view(id.internal, sizeof id.internal));
    } else {
      const std::string told = store.get(key, member.timeout);
      std::memcpy(id.internal, told.data(), std::min(told.size(), sizeof id.internal));
    }
    return id;
  }

  detail::StepGraph agreed(detail::StepGraph graph) {
    const std::uint8_t own[] = {static_cast<std::uint8_t>(graph ? 1 : 0)};
    std::vector<std::uint8_t> all(world_size().value());
    this->all_gather(own, all);
    const auto failed = std::find(all.begin(), all.end(), std::uint8_t{0});
    if (failed == all.end()) return graph;
    const Rank first{static_cast<std::size_t>(failed - all.begin())};
    std::string reason = graph.reason();
    broadcast_object(*this, reason, first);
    return detail::StepGraph("on rank " + std::to_string(first.value()) + ": " + reason);
  }

  detail::nccl::WatchedEngine engine_;
};

static_assert(ArenaAllocating<NcclCommunicator<>> && AsyncReducing<NcclCommunicator<2>> &&
              Splitting<NcclCommunicator<>>);

/// The NCCL communicator of a job's ranks. `name` tells several of one job apart. **Ranks** all.
/// **Host** blocks until all have come.
template <std::size_t Ranks = dynamic>
NcclCommunicator<Ranks> make_nccl_communicator(const Membership& member, Store& store,
                                               const std::string& name = "world") {
  return NcclCommunicator<Ranks>(member, store, name);
}

}  // namespace lockstep
