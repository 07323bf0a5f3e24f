// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Shm>`'s communicator for `Device<Cuda>`: collectives of ranks that are threads of
/// one process, on one or several GPUs.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/loopback.hpp"
#include "lockstep/comm/backends/threads/device_collectives.cuh"
#include "lockstep/comm/backends/threads/meeting.hpp"
#include "lockstep/comm/backends/threads/member.cuh"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/collectives.hpp"
#include "lockstep/comm/combine.cuh"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/rank_gpu.cuh"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/step_graph.cuh"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/launch/store.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep {

/// Collectives of threads. `Ranks` is the world's size where the compiler knows it: reductions are
/// unrolled over it.
///
/// The last rank to make a call enqueues the work of all ranks, on one stream for each GPU: one
/// kernel loads from all ranks' memory, combines in rank order and stores to all ranks' memory,
/// through peer access where that is another GPU's, or in pieces through pinned host memory where
/// there is no such access. Streams wait for each other by events; no kernel ever waits for
/// another. Results are the same bits on all ranks and in every run.
///
/// Every call is compared over ranks before anything is launched. Memory need not be from
/// `allocate`. All ranks give device memory or all give host memory.
///
/// **Host** every collective blocks until all ranks have made the call; with host memory, until the
/// result is here. An asynchronous call of device memory does not block. **Stream** the work comes
/// after what all ranks' compute streams hold at the call, and before what this rank's is given
/// next; after an asynchronous call, before what it is given after `wait` of the handle.
template <std::size_t Ranks = dynamic>
class ThreadCommunicator : public Collectives<ThreadCommunicator<Ranks>> {
  using Member = detail::threads::Member;
  using Offers = std::span<const detail::threads::Offer>;

 public:
  /// With more calls under way than this, a new one waits until all ranks have made the oldest.
  static constexpr std::size_t most_under_way = detail::threads::ring;
  /// All ranks capture and replay together.
  static constexpr bool captures_jointly = true;

  using Milliseconds = std::chrono::milliseconds;

  ThreadCommunicator(const std::shared_ptr<detail::threads::SharedWorld>& world, Rank rank,
                     const std::shared_ptr<Gpu>& gpu, Milliseconds timeout) {
    detail::require_world<Ranks>(WorldSize{world->calls->world()}, rank);
    member_ = std::make_unique<Member>(world, rank, gpu, timeout);
  }
  ThreadCommunicator(ThreadCommunicator&&) noexcept = default;
  ThreadCommunicator& operator=(ThreadCommunicator&&) = delete;

  /// Joins the ranks of a job, all of which are threads of this process. `name` tells several
  /// communicators of one job apart. **Ranks** all. **Host** blocks until all have come.
  static ThreadCommunicator join(const Membership& member, Store& store,
                                 const std::shared_ptr<Gpu>& gpu,
                                 const std::string& name = "world") {
    detail::require_world<Ranks>(member.world, member.rank);
    // A rank that fails before it gets here closes the store, so that no rank waits for it in vain.
    store.barrier("lockstep/threads/" + name, member.rank, member.world, member.timeout);
    return ThreadCommunicator(
        detail::threads::SharedWorld::named(member.job + " " + name, member.world), member.rank,
        gpu, member.timeout);
  }

  Rank rank() const { return member_->rank(); }
  WorldSize world_size() const { return WorldSize{Ranks == dynamic ? member_->world() : Ranks}; }
  Gpu& gpu() const { return *member_->gpu(); }
  Milliseconds timeout() const { return member_->calls().timeout(); }
  void set_timeout(Milliseconds timeout) { member_->set_timeout(timeout); }

  /// `count` elements of this rank's GPU, zeroed. The memory lives as long as the communicator.
  /// **Ranks** this one.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    return {reinterpret_cast<T*>(member_->allocate(count * sizeof(T))), count};
  }

  /// Gives up: every other rank's call fails with this reason. **Ranks** this one.
  void abandon(std::string_view reason) { member_->calls().abandon(reason); }

  /// **Ranks** this one. **Host** blocks until this rank's compute stream is empty, and all ranks
  /// have made the calls that it has made.
  void synchronize() { member_->synchronize(); }

  /// **Host** blocks until all ranks have made the call. **Stream** what any rank's compute stream
  /// is given next comes after what all of them hold at the call.
  void order_streams() {
    if (is_alone()) return;
    const detail::Call call;
    const std::uint64_t ticket =
        member_->start(call, nullptr, nullptr,
                       [](const detail::threads::Lanes& lanes, Offers ranks, std::uint64_t number) {
                         lanes.run(ranks, number, [](const detail::threads::Lane&) {});
                       });
    member_->wait(ticket, call);
  }

  /// Captures what `f` enqueues on the compute streams of all ranks, collectives included, as one
  /// graph of the whole world. If that fails on any rank, no rank has a graph, and the result says
  /// why; nothing else has changed. **Ranks** all; they run `f` by turns. **Host** runs `f`.
  /// **Stream** nothing is run.
  template <class F>
  detail::StepGraph capture(F&& f) {
    return member_->capture(std::forward<F>(f));
  }

  /// Runs a captured step. **Ranks** all, with the graph of the same capture.
  void replay(const detail::StepGraph& graph) {
    detail::Call call;
    call.kind = detail::CollectiveKind::replay;
    call.part_of = detail::step_call_of_thread(detail::JobCall::none);
    if (is_alone() || !graph) {  // where there is no graph, the launch throws and says why
      member_->calls().raise_fault();
      graph.launch(gpu().stream());
      return;
    }
    const std::uint64_t ticket = member_->start(
        call, graph.executable().get(), nullptr,
        [&](const detail::threads::Lanes& lanes, Offers ranks, std::uint64_t number) {
          for (const detail::threads::Offer& other : ranks) {
            if (other.in == ranks[0].in) continue;
            throw Error(call.text(), "ranks replay steps of different captures",
                        "let every rank replay the same one", rank());
          }
          lanes.run_on_first(ranks, number,
                             [&](const detail::threads::Lane& lane) { graph.launch(lane.stream); });
        });
    member_->wait(ticket, call);
  }

  // For the front and for adapters.

  template <class C>
  void perform(const C& call) {
    if constexpr (C::is_message) {
      const detail::CallMemory memory = member_->memory_of(call);
      if constexpr (C::kind == detail::CollectiveKind::send) {
        member_->send(call.call(), call.in.data(), memory.on_host, call.root);
      } else {
        member_->receive(call.call(), call.out.data(), call.out.size_bytes(), memory.on_host,
                         call.root);
      }
      if (memory.is_managed) member_->settle_managed();
    } else if constexpr (C::kind == detail::CollectiveKind::barrier) {
      member_->synchronize();
      agree(call.call());
    } else {
      start(call).wait();
    }
  }

  void agree(const detail::Call& call) {
    member_->calls().meet(call, detail::threads::Offer{}, [](Offers) {});
  }

  /// Calls with host memory are made at once.
  template <class C>
  auto start(const C& call) {
    const detail::Call described = call.call();
    const detail::CallMemory memory = member_->memory_of(call);
    std::optional<std::uint64_t> ticket;
    if (memory.on_host) {
      if (memory.is_managed) member_->settle_managed();  // kernels may still write it
      member_->run_on_host(described, call.in.data(), call.out.data(),
                           [&](Offers ranks) { detail::threads::work_for_all(call, ranks); });
    } else if (is_alone()) {
      member_->calls().raise_fault();
      detail::perform_alone(passes(), call);
      if (memory.is_managed) member_->settle_managed();
    } else {
      ticket = member_->start(
          described, call.in.data(), call.out.data(),
          [&](const detail::threads::Lanes& lanes, Offers ranks, std::uint64_t number) {
            if (lanes.staging() == nullptr) {
              detail::threads::enqueue<Ranks>(call, lanes, ranks, number);
            } else {
              detail::threads::enqueue_staged<Ranks>(call, lanes, ranks, number);
            }
          });
    }
    return Work<Pending>(std::in_place, *member_, ticket, described, memory.is_managed);
  }

  /// The communicator of this rank's group, if it is in one.
  template <std::size_t GroupRanks>
  std::optional<ThreadCommunicator<GroupRanks>> split(const detail::GroupPlace& place) {
    using World = std::shared_ptr<detail::threads::SharedWorld>;
    World world;  // made by the leader of a group
    if (place.is_member() && place.rank == Rank{0})
      world = std::make_shared<detail::threads::SharedWorld>(place.world());
    member_->calls().meet(
        detail::division_call(place), {&place, &world, nullptr, true}, [](Offers ranks) {
          for (const detail::threads::Offer& rank : ranks) {
            const auto& own = *static_cast<const detail::GroupPlace*>(rank.in);
            if (!own.is_member()) continue;
            *static_cast<World*>(rank.out) = *static_cast<World*>(ranks[own.leader().value()].out);
          }
        });
    if (!place.is_member()) return std::nullopt;
    return std::optional<ThreadCommunicator<GroupRanks>>(std::in_place, std::move(world),
                                                         place.rank, member_->gpu(), timeout());
  }

  detail::StreamPasses passes() const { return detail::StreamPasses(gpu().stream()); }

 private:
  /// Is this rank a world of one, such as the only replica of a job that could have had several?
  /// Its compute stream then needs no other.
  bool is_alone() const { return world_size() == WorldSize{1}; }

  /// A call under way: announced, or done at once if it has no number.
  struct Pending {
    Member& member;
    std::optional<std::uint64_t> ticket;
    detail::Call call;
    bool is_managed;

    bool test() const { return !ticket || member.test(*ticket); }
    void wait() {
      if (!ticket) return;
      member.wait(*ticket, call);
      if (is_managed) member.settle_managed();
    }
    /// Returns once no rank will begin to work on this one's memory and the GPUs are done with it.
    void leave() {
      if (!ticket) return;
      if (!member.calls().is_done(*ticket)) member.calls().abandon(detail::ended_by_exception);
      member.finish_lanes();
    }
  };

  std::unique_ptr<Member> member_;
};

/// The communicator of a job whose ranks are threads of this process, on the GPU that the rank's
/// place on the host gives it. **Ranks** all. **Host** blocks until all have come.
template <std::size_t Ranks = dynamic>
ThreadCommunicator<Ranks> make_thread_communicator(const Membership& member, Store& store,
                                                   const std::string& name = "world") {
  if (member.local_world != member.world.value()) {
    throw Error("Backend<Shm>",
                "of the job's " + std::to_string(member.world.value()) + " ranks, " +
                    std::to_string(member.local_world) + " are on this host",
                "with Device<Cuda> its ranks are threads of one process: start it once, with "
                "--ranks " +
                    std::to_string(member.world.value()),
                member.rank);
  }
  return ThreadCommunicator<Ranks>::join(member, store, detail::gpu_of(member), name);
}

}  // namespace lockstep
