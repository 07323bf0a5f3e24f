// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Nccl>`'s communicator: collectives of ranks that have a GPU each.

#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/device/cuda/step_graph.cuh"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/backends/nccl/move.cuh"
#include "lockstep/comm/backends/nccl/reduce.cuh"
#include "lockstep/comm/backends/nccl/sharing.cuh"
#include "lockstep/comm/backends/nccl/watch.cuh"
#include "lockstep/comm/backends/nccl/work.cuh"
#include "lockstep/comm/objects.hpp"
#include "lockstep/comm/rank_gpu.cuh"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/flat.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/store.hpp"
#include "lockstep/topology/world.hpp"

namespace lockstep {

/// Collectives through NCCL. Reductions are its own, averages and pre-multiplied sums included;
/// what it lacks (16-bit integers, bit operations, minima that keep a NaN) is gathered and combined
/// in rank order. Sums of 16-bit floats are rounded at every step, as NCCL does it.
///
/// A thread watches every communicator. A call that is not over at the time limit, a rank that
/// fails, and ranks that make different calls are noticed, and end the communicator on all ranks
/// with one error, which every call throws from then on. Nothing hangs.
///
/// Every collective, unless it says otherwise: **Ranks** all of them, in the same order. **Host**
/// does not block for device memory; host memory is staged, and the host blocks until the result
/// is here: it is meant for small control data. **Stream** it comes after what the compute stream
/// `gpu().stream()` holds, and what that is given afterwards sees the result.
template <std::size_t Ranks = dynamic>
class NcclCommunicator {
 public:
  /// With more calls under way than this, a new one waits for the oldest on the host.
  static constexpr std::size_t most_under_way = nccl::UnderWay::most;

  /// Joins the job's communicator of this name, on the GPU that is this rank's. **Ranks** all.
  /// **Host** blocks until all have come.
  NcclCommunicator(const Membership& member, Store& store, const std::string& name = "world")
      : NcclCommunicator(member, store, name, gpu_of(member)) {}
  /// The same with a GPU, and a compute stream, of the caller's choice.
  NcclCommunicator(const Membership& member, Store& store, const std::string& name,
                   std::shared_ptr<Gpu> gpu)
      : engine_(join(member, store, name, std::move(gpu))) {}

  /// A group's end of a split.
  explicit NcclCommunicator(std::shared_ptr<nccl::Engine> engine) : engine_(std::move(engine)) {}

  NcclCommunicator(NcclCommunicator&&) noexcept = default;
  NcclCommunicator& operator=(NcclCommunicator&&) = delete;

  Rank rank() const { return engine_->rank(); }
  WorldSize world_size() const { return WorldSize{engine_->world()}; }
  Gpu& gpu() const { return engine_->gpu(); }
  nccl::Milliseconds timeout() const { return engine_->timeout(); }
  void set_timeout(nccl::Milliseconds timeout) { engine_->set_timeout(timeout); }

  /// `count` elements of device memory that NCCL knows, zeroed. It lives as long as the
  /// communicator. **Ranks** any. **Host** blocks.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    return {reinterpret_cast<T*>(engine_->allocate(count * sizeof(T))), count};
  }

  /// Gives up: every other rank's call fails with this reason, and the communicator ends.
  void abandon(std::string_view reason) {
    engine_->link().fail(
        Error("NCCL's communicator '" + engine_->seat().name + "'",
              "this rank gave it up: " + std::string(reason), "start the job again", rank()),
        reason);
  }

  /// **Host** blocks until the compute streams of all ranks have got here.
  void barrier() {
    std::uint8_t token[] = {0};
    nccl::transfer<std::uint8_t>(
        *engine_, barrier_call(), token, token, [&](const std::uint8_t* in, std::uint8_t* out) {
          engine_->link().nccl("ncclAllReduce", [&](ncclComm_t comm) {
            return ncclAllReduce(in, out, 1, ncclUint8, ncclSum, comm, engine_->stream());
          });
        });
  }

  /// **Ranks** this one. **Host** blocks until the compute stream is empty, and throws what went
  /// wrong.
  void synchronize() { engine_->synchronize(); }

  /// **Ranks** this one. Throws what went wrong, if anything has.
  void raise_fault() { engine_->raise_fault(); }

  /// Compares a call over ranks that is made by other means. **Ranks** all. **Host** does not
  /// block: like every difference, this one is found in the background.
  void agree(const Call& call) {
    engine_->post(call, [] {});
  }

  /// data = op over ranks, on all ranks.
  template <class Data, class Op = Sum>
  void all_reduce(Data&& data, Op op = {}) {
    engine_->order(nccl::all_reduce(*engine_, flat(data), op));
  }

  /// The same, asynchronously. **Host** does not block. **Stream** it comes after what the compute
  /// stream holds; what that is given after `wait` of the handle sees the result. The data belongs
  /// to the call until then.
  template <class Data, class Op = Sum>
  nccl::Work all_reduce_async(Data&& data, Op op = {}) {
    return {*engine_, nccl::all_reduce(*engine_, flat(data), op)};
  }

  /// On `root`, data = op over ranks; elsewhere it keeps what it was.
  template <class Data, class Op = Sum>
  void reduce(Data&& data, Rank root, Op op = {}) {
    engine_->order(nccl::reduce(*engine_, flat(data), root, op));
  }

  /// data = root's data.
  template <class Data>
  void broadcast(Data&& data, Rank root) {
    engine_->order(nccl::broadcast(*engine_, flat(data), root));
  }

  /// out = every rank's in, one behind the other.
  template <class In, class Out>
  void all_gather(const In& in, Out&& out) {
    engine_->order(nccl::all_gather(*engine_, flat(in), flat(out)));
  }

  /// On `root`, out = every rank's in; elsewhere out is not used.
  template <class In, class Out>
  void gather(const In& in, Out&& out, Rank root) {
    engine_->order(nccl::gather(*engine_, flat(in), flat(out), root));
  }

  /// out = this rank's piece of root's in. Elsewhere in is not used.
  template <class In, class Out>
  void scatter(const In& in, Out&& out, Rank root) {
    engine_->order(nccl::scatter(*engine_, flat(in), flat(out), root));
  }

  /// out = op over ranks of this rank's piece of in.
  template <class In, class Out, class Op = Sum>
  void reduce_scatter(const In& in, Out&& out, Op op = {}) {
    engine_->order(nccl::reduce_scatter(*engine_, flat(in), flat(out), op));
  }

  /// Piece w of out = piece `rank` of rank w's in.
  template <class In, class Out>
  void all_to_all(const In& in, Out&& out) {
    engine_->order(nccl::all_to_all(*engine_, flat(in), flat(out)));
  }

  /// Sends elements to one rank. **Ranks** this one, and `to` calls `receive`. Two ranks that both
  /// send first wait for each other.
  template <class Data>
  void send(const Data& data, Rank to) {
    nccl::arguments(*engine_).check_peer("send", to);
    engine_->order(nccl::send(*engine_, flat(data), to));
  }

  /// Receives elements from one rank. **Ranks** this one, and `from` calls `send` with the same
  /// type and count.
  template <class Data>
  void receive(Data&& data, Rank from) {
    nccl::arguments(*engine_).check_peer("receive", from);
    engine_->order(nccl::receive(*engine_, flat(data), from));
  }

  /// Captures the step that `f()` puts on the compute stream, collectives included, without running
  /// it. If that fails on any rank, no rank gets a graph, and each is told why. Run the step once
  /// before: what is set up at first use cannot be captured. **Ranks** all. **Host** blocks.
  template <class F>
  StepGraph capture(F&& f) {
    engine_->raise_fault();
    StepGraph graph = agreed(capture_stream(gpu().stream(), std::forward<F>(f)));
    engine_->adopt(graph);
    return graph;
  }

  /// Runs a captured step. The graph must not be used after the communicator's end. **Ranks** all.
  /// **Host** does not block. **Stream** after what the compute stream holds, and before what it is
  /// given next.
  void replay(const StepGraph& graph) { engine_->replay(graph); }

  nccl::Engine& engine() const { return *engine_; }

 private:
  static std::shared_ptr<nccl::Engine> join(const Membership& member, Store& store,
                                            const std::string& name, std::shared_ptr<Gpu> gpu) {
    require_world<Ranks>(member.world, member.rank);
    const bool alone = member.world == WorldSize{1};
    if (!alone && nccl::gpus_are_shared(member, store, *gpu, name))
      nccl::pretend_to_be_hosts(member);
    const ncclUniqueId id = meet(member, store, name);
    auto engine = std::make_shared<nccl::Engine>(
        nccl::Seat{member.rank, member.world, name, std::move(gpu),
                   std::make_shared<Store>(member.host, member.port, member.secret, member.timeout),
                   member.timeout});
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    engine->connect([&](ncclComm_t* comm) {
      return ncclCommInitRankConfig(comm, static_cast<int>(member.world.value()), id,
                                    static_cast<int>(member.rank.value()), &config);
    });
    return engine;
  }

  /// Rank 0 opens the meeting point, and the others are told.
  static ncclUniqueId meet(const Membership& member, Store& store, const std::string& name) {
    const std::string key = "lockstep/nccl/" + name + "/id";
    ncclUniqueId id{};
    if (member.rank == Rank{0}) {
      check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
      store.set(key, std::string_view(id.internal, sizeof id.internal));
    } else {
      const std::string told = store.get(key, member.timeout);
      std::memcpy(id.internal, told.data(), std::min(told.size(), sizeof id.internal));
    }
    return id;
  }

  static Call barrier_call() {
    Call call;
    call.count = 1;
    return call;
  }

  StepGraph agreed(StepGraph graph) {
    const std::uint8_t own[] = {static_cast<std::uint8_t>(graph ? 1 : 0)};
    std::vector<std::uint8_t> all(world_size().value());
    all_gather(own, all);
    const auto failed = std::find(all.begin(), all.end(), std::uint8_t{0});
    if (failed == all.end()) return graph;
    const Rank first{static_cast<std::size_t>(failed - all.begin())};
    std::string reason = graph.reason();
    broadcast_object(*this, reason, first);
    return StepGraph("on rank " + std::to_string(first.value()) + ": " + reason);
  }

  nccl::WatchedEngine engine_;
};

static_assert(ArenaAllocating<NcclCommunicator<>> && AsyncReducing<NcclCommunicator<2>>);
static_assert(ReduceScattering<NcclCommunicator<>> && Scattering<NcclCommunicator<>> &&
              Messaging<NcclCommunicator<>>);

/// The NCCL communicator of a job's ranks. `name` tells several of one job apart. **Ranks** all.
/// **Host** blocks until all have come.
template <std::size_t Ranks = dynamic>
NcclCommunicator<Ranks> make_nccl_communicator(const Membership& member, Store& store,
                                               const std::string& name = "world") {
  return NcclCommunicator<Ranks>(member, store, name);
}

}  // namespace lockstep
