// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Nccl>`'s communicator, for ranks with a GPU each.

#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/comm/nccl/calls.cuh"
#include "lockstep/detail/comm/nccl/watch.cuh"
#include "lockstep/detail/launch/host.hpp"

namespace lockstep {

/// Collectives through NCCL. Reductions that NCCL lacks (16-bit integers, bit operations, min and
/// max that keep NaN) combine gathered elements in rank order. Sums of 16-bit floats are rounded at
/// each step. An average is a sum and a division, rounded once: NCCL's rounds 1/N in T.
///
/// A watchdog thread detects calls that exceed the timeout, failed ranks, and ranks that make
/// different calls. It aborts the communicator on all ranks with one error, which is final.
///
/// **Host** no collective on device memory blocks, except `barrier`; host memory, for small control
/// data, is staged and blocks until the result is here. **Stream** a call runs after what the
/// compute stream `gpu().stream()` holds; work enqueued later, or after `wait`, sees the result.
template <std::size_t Ranks = dynamic>
class NcclCommunicator : public Collectives<NcclCommunicator<Ranks>> {
  using Engine = detail::nccl::Engine;
  using Ticket = detail::nccl::Ticket;

 public:
  /// An average costs an extra pass, so a job leaves the division of gradients to the update.
  static constexpr bool averages_by_sums = true;
  /// With this many calls in flight, a new one blocks the host until the oldest has completed.
  static constexpr std::size_t most_in_flight = detail::nccl::CallRing::most;

  /// Joins the job's communicator `name`. **Ranks** all. **Host** blocks until all have joined.
  NcclCommunicator(const Membership& member, Store& store, const std::string& name = "world")
      : NcclCommunicator(member, store, name, detail::gpu_of(member)) {}
  /// Joins with a given GPU and compute stream. Without `warms_up`, the caller calls `warm_up`.
  NcclCommunicator(const Membership& member, Store& store, const std::string& name,
                   std::shared_ptr<Gpu> gpu, bool warms_up = true)
      : engine_(join(member, store, name, std::move(gpu))) {
    if (warms_up) warm_up();
  }
  /// The communicator of a group, made by `split`.
  explicit NcclCommunicator(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  Rank rank() const { return engine_->rank(); }
  WorldSize world_size() const { return WorldSize{engine_->world()}; }
  Gpu& gpu() const { return engine_->gpu(); }
  std::chrono::milliseconds timeout() const { return engine_->timeout(); }
  void set_timeout(std::chrono::milliseconds timeout) { engine_->set_timeout(timeout); }

  /// Zeroed elements, registered with NCCL, for its lifetime. **Ranks** this one. **Host** blocks.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    return {reinterpret_cast<T*>(engine_->allocate(count * sizeof(T))), count};
  }

  void abort(std::string_view reason) { engine_->give_up(reason); }

  /// **Ranks** this one. **Host** blocks until the compute stream is idle; throws the fault if any.
  void synchronize() { engine_->synchronize(); }

  /// **Ranks** this one. Throws the fault, if any.
  void raise_fault() { engine_->raise_fault(); }

  /// **Ranks** this one. **Host** does not block. **Stream** the compute stream waits for all calls
  /// so far, so that calls of another communicator may follow, in the same order on all ranks.
  void order_calls() { engine_->order_all(); }

  /// Captures the work that `f()` enqueues on the compute stream, collectives included, without
  /// running it. If that fails on any rank, no rank gets a graph, and each gets the reason. Run the
  /// step once before: lazy initialisation cannot be captured. **Ranks** all. **Host** blocks.
  template <class F>
  detail::StepGraph capture(F&& f) {
    engine_->raise_fault();
    detail::StepGraph graph = agreed(detail::capture_stream(gpu().stream(), std::forward<F>(f)));
    engine_->adopt(graph);
    return graph;
  }

  /// Runs a captured step. The graph must not outlive the communicator. **Ranks** all. **Host**
  /// does not block. **Stream** ordered on the compute stream.
  void replay(const detail::StepGraph& graph) { engine_->replay(graph); }

  /// Makes NCCL's first calls, which connect ranks and allocate. Communicators whose ranks are
  /// threads of one process must do so one at a time. **Ranks** all. **Host** blocks.
  void warm_up() {
    const std::size_t world = world_size().value();
    if (world == 1) return;
    // NCCL has other algorithms for few bytes than for many. Whole packets keep pieces aligned.
    constexpr std::size_t packet = 16 / sizeof(float);
    constexpr std::size_t half = Engine::scratch_bytes / 2 / sizeof(float);
    float* const data = reinterpret_cast<float*>(engine_->scratch());
    for (const std::size_t each : {packet, half / 2 / world / packet * packet}) {
      const std::span<float> all(data, each * world);
      const std::span<float> piece(data + half, each);
      this->all_reduce(all, Sum{});
      this->broadcast(all, Rank{0});
      this->all_gather(piece, all);
      this->reduce_scatter(all, piece, Sum{});
    }
    synchronize();
  }
  /// The same for messages and all-to-all: they connect every pair of ranks, at a cost in memory.
  void warm_up_messages() {
    const std::size_t world = world_size().value();
    if (world == 1) return;
    std::uint8_t* const data = reinterpret_cast<std::uint8_t*>(engine_->scratch());
    this->all_to_all(std::span(data, world), std::span(data + world, world));
    synchronize();
  }

  template <class C>
  void perform(const C& call) {
    if constexpr (C::kind == detail::CollectiveKind::barrier) {
      // The barrier is an all-reduce, which completes when every rank's stream has reached it.
      std::uint8_t token[] = {0};
      const detail::calls::AllReduce<std::uint8_t, Sum> barrier{token, token, 1};
      post(call.call(), barrier);
    } else {
      engine_->order(post(call.call(), call));
    }
  }

  /// **Host** does not block: the watchdog compares the calls of ranks.
  void agree(const detail::Call& call) {
    engine_->post(call, [] {});
  }

  template <class C>
  auto start(const C& call) {
    return Work<Pending>(std::in_place, *engine_, post(call.call(), call));
  }

  /// This rank's group, if any, on the same GPU and stream. **Host** blocks until it is connected.
  template <std::size_t GroupRanks>
  std::optional<NcclCommunicator<GroupRanks>> split(const detail::GroupPosition& position) {
    const int colour = position.is_member() ? static_cast<int>(position.group) : NCCL_SPLIT_NOCOLOR;
    const std::string name = engine_->next_group_name(position.group);
    std::shared_ptr<Engine> group;  // made before ranks wait, because it allocates
    if (position.is_member()) group = engine_->beside(name, position.rank, position.world());
    engine_->post(detail::division_call(position), [&] {
      engine_->split_result() = nullptr;
      engine_->nccl("ncclCommSplit", [&](ncclComm_t comm) {
        return ncclCommSplit(comm, colour, static_cast<int>(position.rank.value()),
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

  /// Another communicator, of any ranks of the job, uniquely named, on the same GPU and compute
  /// stream. The caller calls `warm_up`. **Ranks** its members. **Host** blocks until all join.
  NcclCommunicator<> among(const std::string& name, Rank rank, WorldSize world) const {
    std::shared_ptr<Engine> engine = engine_->beside(name, rank, world);
    connect(*engine);
    return NcclCommunicator<>(std::move(engine));
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

  /// Enqueues a call. `described` is its name in the log and in errors.
  template <class C>
  Ticket post(const detail::Call& described, const C& call) {
    if (call.count == 0) return engine_->post(described, [] {});
    if (detail::is_host_call(call, gpu())) return post_staged(described, call);
    return engine_->post(described, [&] { execute(call); });
  }

  template <class C>
  void execute(const C& call) {
    detail::nccl::Transport transport(*engine_);
    detail::execute_any(transport, call);
  }

  /// Stages host memory in parts, of equal size on all ranks, and waits for each part.
  template <class C>
  Ticket post_staged(const detail::Call& described, const C& call) {
    using T = typename C::element;
    engine_->require_no_capture(described, "give it device memory, or do it outside of the step");
    const std::size_t world = world_size().value();
    const std::size_t in_rows = call.in.empty() ? 0 : C::deals_pieces ? world : 1;
    const std::size_t out_rows = call.out.empty() ? 0 : C::collects_pieces ? world : 1;
    const std::size_t rows = (C::deals_pieces ? world : 1) + (C::collects_pieces ? world : 1);
    const std::size_t most = (Engine::staged_bytes - arena_alignment) / (rows * sizeof(T));
    Ticket ticket;
    for (std::size_t begin = 0; begin < call.count; begin += most) {
      const std::size_t n = std::min(most, call.count - begin);
      const std::size_t out_at = detail::align_up(in_rows * n * sizeof(T));
      T* const in = reinterpret_cast<T*>(engine_->staged_on_host());
      T* const out = reinterpret_cast<T*>(engine_->staged_on_host() + out_at);
      std::byte* const gpu_in = engine_->staged_on_gpu();
      std::byte* const gpu_out = gpu_in + out_at;
      for (std::size_t row = 0; row < in_rows; ++row)
        std::copy_n(call.in.data() + row * call.count + begin, n, in + row * n);
      ticket = engine_->post(described, [&] {
        detail::copy_async(gpu_in, in, in_rows * n * sizeof(T), engine_->stream());
        execute(call.on({reinterpret_cast<const T*>(gpu_in), in_rows * n},
                        {reinterpret_cast<T*>(gpu_out), out_rows * n}, n));
        detail::copy_async(out, gpu_out, out_rows * n * sizeof(T), engine_->stream());
      });
      engine_->wait(ticket);
      for (std::size_t row = 0; row < out_rows; ++row)
        std::copy_n(out + row * n, n, call.out.data() + row * call.count + begin);
    }
    return ticket;
  }

  static std::shared_ptr<Engine> join(const Membership& member, Store& store,
                                      const std::string& called, std::shared_ptr<Gpu> gpu) {
    detail::require_world<Ranks>(member.world, member.rank);
    auto engine = std::make_shared<Engine>(
        member, detail::numbered_rendezvous(store, member.rank, "nccl", called), std::move(gpu),
        std::make_shared<Store>(store.share()));
    connect(*engine);
    return engine;
  }

  /// Rank 0 publishes NCCL's unique id through the store.
  static void connect(Engine& engine) {
    const Membership& member = engine.member();
    if (member.world > WorldSize{1}) pretend_other_hosts(engine);
    const std::string key = "lockstep/nccl/" + engine.name() + "/id";
    ncclUniqueId id{};
    if (member.rank == Rank{0}) {
      const ncclResult_t made = ncclGetUniqueId(&id);
      if (made != ncclSuccess) throw detail::nccl::error_of(made, "ncclGetUniqueId");
      engine.store().set(key, std::string_view(id.internal, sizeof id.internal));
    } else {
      engine.store().get(key, engine.timeout()).copy(id.internal, sizeof id.internal);
    }
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    engine.connect([&](ncclComm_t* comm) {
      return ncclCommInitRankConfig(comm, static_cast<int>(member.world.value()), id,
                                    static_cast<int>(member.rank.value()), &config);
    });
  }

  /// NCCL rejects two ranks on one GPU of a host, so ranks that share one pretend to be on
  /// different hosts (NCCL_HOSTID) and communicate through sockets: slow, but enough for trials.
  static void pretend_other_hosts(const Engine& engine) {
    const detail::GpuSharing sharing = detail::compare_gpus(engine.member(), engine.store(),
                                                            engine.gpu(), "nccl/" + engine.name());
    if (!sharing.has_neighbour[engine.rank().value()]) return;
    if (sharing.is_one_host) detail::use_shared_gpu_variable("NCCL_SOCKET_IFNAME");
    if (detail::use_shared_gpu_variable("NCCL_HOSTID")) return;
    throw Error(
        "Backend<Nccl>", "ranks share a GPU, which NCCL takes for a mistake",
        "start them with lockstep's launcher and LOCKSTEP_SHARE_GPUS=1, or set NCCL_HOSTID to "
        "another value for every rank before it starts",
        engine.rank());
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

/// Joins the job's NCCL communicator. **Ranks** all. **Host** blocks until all have joined.
template <std::size_t Ranks = dynamic>
NcclCommunicator<Ranks> make_nccl_communicator(const Membership& member, Store& store,
                                               const std::string& name = "world") {
  return NcclCommunicator<Ranks>(member, store, name);
}

}  // namespace lockstep
