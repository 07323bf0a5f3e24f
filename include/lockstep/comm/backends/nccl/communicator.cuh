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

#include "lockstep/comm/backends/nccl/engine.cuh"
#include "lockstep/comm/backends/nccl/join.cuh"
#include "lockstep/comm/backends/nccl/transport.cuh"
#include "lockstep/comm/backends/nccl/watch.cuh"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/collectives.hpp"
#include "lockstep/comm/combine.cuh"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/groups.hpp"
#include "lockstep/comm/rank_gpu.cuh"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/step_graph.cuh"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/launch/store.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep {

/// Collectives through NCCL. Reductions are its own; those that it lacks (16-bit integers, bit
/// operations, minima that keep a NaN) are made of gathered elements, in rank order. Sums of 16-bit
/// floats are rounded at every step, as NCCL does it. An average is a sum that one pass divides,
/// rounded once: NCCL's own average rounds 1/N to the element type.
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
  using Later = detail::nccl::WarmUpLater;

 public:
  using Milliseconds = std::chrono::milliseconds;

  /// An average is a sum and a pass: a job that averages gradients leaves the division to the
  /// update.
  static constexpr bool averages_by_sums = true;
  /// With more calls under way than this, a new one waits for the oldest on the host.
  static constexpr std::size_t most_under_way = detail::nccl::UnderWay::most;

  /// Joins the job's communicator of this name, on the GPU that is this rank's. **Ranks** all.
  /// **Host** blocks until all have come.
  NcclCommunicator(const Membership& member, Store& store, const std::string& name = "world")
      : NcclCommunicator(member, store, name, detail::gpu_of(member)) {}
  /// Joins with a GPU and a compute stream of the caller's choice.
  NcclCommunicator(const Membership& member, Store& store, const std::string& name,
                   std::shared_ptr<Gpu> gpu)
      : NcclCommunicator(member, store, name, std::move(gpu), Later{}) {
    warm_up();
  }
  /// The same, and the caller sees to `warm_up`.
  NcclCommunicator(const Membership& member, Store& store, const std::string& name,
                   std::shared_ptr<Gpu> gpu, Later)
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
  void abandon(std::string_view reason) { engine_->give_up(reason); }

  /// **Ranks** this one. **Host** blocks until the compute stream is empty, and throws what went
  /// wrong.
  void synchronize() { engine_->synchronize(); }

  /// **Ranks** this one. Throws the fault, if there is one.
  void raise_fault() { engine_->raise_fault(); }

  /// **Ranks** this one. **Host** does not block. **Stream** the compute stream waits for all calls
  /// so far: another communicator's may follow, in one order on all ranks.
  void order_calls() { engine_->order_all(); }

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

  /// Makes NCCL's first calls, in which it connects ranks and allocates. Where several ranks are
  /// threads of one process, no two of its communicators do it at the same time. **Ranks** all.
  /// **Host** blocks.
  void warm_up() { detail::nccl::warm_up(*engine_); }
  /// The same for messages and the calls that are made of them, which connect every two ranks.
  void warm_up_messages() { detail::nccl::warm_up_messages(*engine_); }

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
    std::shared_ptr<Engine> group;  // made before ranks meet, because it allocates
    if (place.is_member()) {
      group = std::make_shared<Engine>(
          detail::nccl::JoinOptions{place.rank, place.world(), name, engine_->joined().gpu,
                                    engine_->joined().store, engine_->timeout()});
    }
    engine_->post(detail::division_call(place), [&] {
      engine_->split_result() = nullptr;
      engine_->link().nccl("ncclCommSplit", [&](ncclComm_t comm) {
        return ncclCommSplit(comm, colour, static_cast<int>(place.rank.value()),
                             &engine_->split_result(), nullptr);
      });
    });
    if (group == nullptr) return std::nullopt;
    group->connect([&](ncclComm_t* comm) {
      *comm = std::exchange(engine_->split_result(), nullptr);
      return ncclSuccess;
    });
    std::optional<NcclCommunicator<GroupRanks>> joined(std::in_place, std::move(group));
    joined->warm_up();
    return joined;
  }

  /// A further communicator, of ranks of the job that need not be in this one, on the same GPU and
  /// compute stream. No other of the job has its name. The caller sees to `warm_up`. **Ranks** its
  /// members. **Host** blocks until all have come.
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
    void leave() { engine.leave(ticket); }
  };

  /// Puts a call on the stream. `described` is how the log and errors name it.
  template <class C>
  Ticket post(const detail::Call& described, const C& call) {
    if (call.count == 0) return engine_->post(described, [] {});
    const bool host_in = is_host(described, call.in);
    const bool host_out = call.out.data() == call.in.data() ? host_in && !call.out.empty()
                                                            : is_host(described, call.out);
    if (host_in || host_out) return post_staged(described, call, host_in, host_out);
    return engine_->post(described, [&] { execute(call); });
  }

  template <class C>
  void execute(const C& call) {
    detail::nccl::Transport transport(*engine_);
    detail::execute_any(transport, call);
  }

  template <class T>
  bool is_host(const detail::Call& described, std::span<T> values) const {
    return !values.empty() && detail::nccl::is_staged_memory(values.data(), gpu(), described);
  }

  /// A call with host memory goes through device memory, in parts of one size on all ranks, each of
  /// which is waited for.
  template <class C>
  Ticket post_staged(const detail::Call& described, const C& call, bool host_in, bool host_out) {
    using T = typename C::element;
    engine_->require_no_capture(described, "give it device memory, or do it outside of the step");
    const std::size_t world = world_size().value();
    const std::size_t in_rows = C::deals_pieces ? world : 1;
    const std::size_t out_rows = C::collects_pieces ? world : 1;
    const std::size_t width = detail::nccl::Staging::width<T>(in_rows + out_rows);
    Ticket ticket;
    for (std::size_t begin = 0; begin < call.count; begin += width) {
      const std::size_t n = std::min(width, call.count - begin);
      ticket = post_part(described, call, begin, n, {in_rows, host_in}, {out_rows, host_out});
    }
    return ticket;
  }

  /// One side of a part: rows of `call.count` elements, of which n each belong to it.
  struct Side {
    std::size_t rows;
    bool on_host;
  };

  template <class C>
  Ticket post_part(const detail::Call& described, const C& call, std::size_t begin, std::size_t n,
                   Side in, Side out) {
    using T = typename C::element;
    const bool is_whole = n == call.count;
    const bool stages_in = !call.in.empty() && (in.on_host || !is_whole);
    const bool stages_out = !call.out.empty() && (out.on_host || !is_whole);
    const std::size_t in_bytes = in.rows * n * sizeof(T);
    const std::size_t out_bytes = out.rows * n * sizeof(T);
    std::byte* const host = engine_->staging().host();
    std::byte* const device = engine_->staging().device();
    std::byte* const host_out = host + detail::align_up(in_bytes);
    std::byte* const device_out = device + detail::align_up(in_bytes);
    const auto for_rows = [&](std::size_t rows, auto* data, std::byte* packed, const auto& f) {
      for (std::size_t row = 0; row < rows; ++row)
        f(data + row * call.count + begin, packed + row * n * sizeof(T));
    };
    if (stages_in && in.on_host) {
      for_rows(in.rows, call.in.data(), host,
               [&](const T* from, std::byte* to) { std::memcpy(to, from, n * sizeof(T)); });
    }
    const Ticket ticket = engine_->post(described, [&] {
      if (stages_in && in.on_host) {
        engine_->copy(device, host, in_bytes, cudaMemcpyHostToDevice);
      } else if (stages_in) {
        for_rows(in.rows, call.in.data(), device, [&](const T* from, std::byte* to) {
          engine_->copy(to, from, n * sizeof(T), cudaMemcpyDeviceToDevice);
        });
      }
      const T* const given = stages_in ? reinterpret_cast<const T*>(device) : call.in.data();
      T* const got = stages_out ? reinterpret_cast<T*>(device_out) : call.out.data();
      execute(call.on({given, call.in.empty() ? 0 : in.rows * n},
                      {got, call.out.empty() ? 0 : out.rows * n}, n));
      if (stages_out && out.on_host) {
        engine_->copy(host_out, device_out, out_bytes, cudaMemcpyDeviceToHost);
      } else if (stages_out) {
        for_rows(out.rows, call.out.data(), device_out, [&](T* to, const std::byte* from) {
          engine_->copy(to, from, n * sizeof(T), cudaMemcpyDeviceToDevice);
        });
      }
    });
    engine_->wait(ticket);
    if (stages_out && out.on_host) {
      for_rows(out.rows, call.out.data(), host_out,
               [&](T* to, const std::byte* from) { std::memcpy(to, from, n * sizeof(T)); });
    }
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
