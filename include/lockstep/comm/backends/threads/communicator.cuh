// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Shm>`'s communicator for `Device<Cuda>`: collectives of ranks that are threads of
/// one process, on one or several GPUs.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/gpu_arguments.cuh"
#include "lockstep/comm/backends/threads/device_collectives.cuh"
#include "lockstep/comm/backends/threads/host_collectives.hpp"
#include "lockstep/comm/backends/threads/member.cuh"
#include "lockstep/comm/backends/threads/work.cuh"
#include "lockstep/comm/backends/threads/world.cuh"
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

/// Collectives of threads. `Ranks` is the world's size where the compiler knows it: reductions are
/// unrolled over it.
///
/// Whoever is the last to make a call enqueues the work of all, on a stream of its own for each
/// GPU: one kernel loads from all ranks' memory, combines in rank order and stores to all ranks'
/// memory, through peer access where that is another GPU's. Streams wait for each other by events;
/// no kernel ever waits for another. Results are the same bits on all ranks and in every run.
///
/// Every call is compared over ranks before anything is launched. Memory need not be from
/// `allocate`.
///
/// Every collective, unless it says otherwise: **Ranks** all of them, in the same order, all with
/// device memory or all with host memory. **Host** blocks until all ranks have made the call; with
/// host memory, until the result is here. **Stream** the work comes after what all ranks' compute
/// streams hold at the call, and before what this rank's is given next.
template <std::size_t Ranks = dynamic>
class ThreadCommunicator {
 public:
  /// With more calls under way than this, a new one waits until all ranks have made the oldest.
  static constexpr std::size_t most_under_way = threads::ring;
  /// A captured step is that of all ranks: they capture and replay together.
  static constexpr bool captures_jointly = true;

  using Milliseconds = threads::Milliseconds;

  ThreadCommunicator(std::shared_ptr<threads::SharedWorld> world, Rank rank,
                     std::shared_ptr<Gpu> gpu, Milliseconds timeout)
      : ThreadCommunicator(std::move(world), rank, std::move(gpu), timeout, [] {}) {}

  ThreadCommunicator(ThreadCommunicator&&) noexcept = default;
  ThreadCommunicator& operator=(ThreadCommunicator&&) = delete;

  /// Joins the ranks of a job, all of which are threads of this process. `name` tells several
  /// communicators of one job apart. **Ranks** all. **Host** blocks until all have come.
  static ThreadCommunicator join(const Membership& member, Store& store, std::shared_ptr<Gpu> gpu,
                                 const std::string& name = "world") {
    require_world<Ranks>(member.world, member.rank);
    // Whoever fails before it gets here closes the store: nobody waits for it in vain.
    store.barrier("lockstep/threads/" + name, member.rank, member.world, member.timeout);
    const std::string key = member.job + " " + name;
    return ThreadCommunicator(threads::OpenWorlds::find(key, member.world), member.rank,
                              std::move(gpu), member.timeout,
                              [&] { threads::OpenWorlds::close(key); });
  }

  Rank rank() const { return member_->rank(); }
  WorldSize world_size() const { return WorldSize{world()}; }
  Gpu& gpu() const { return *member_->gpu(); }
  Milliseconds timeout() const { return member_->seat().timeout(); }
  void set_timeout(Milliseconds timeout) { member_->set_timeout(timeout); }

  /// `count` elements of this rank's GPU, zeroed. The memory lives as long as the communicator.
  /// **Ranks** this one.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    return {reinterpret_cast<T*>(member_->allocate(count * sizeof(T))), count};
  }

  /// Gives up: every other rank's call fails with this reason. **Ranks** this one.
  void abandon(std::string_view reason) { member_->seat().abandon(reason); }

  /// **Host** blocks until the compute streams of all ranks have got here.
  void barrier() {
    member_->synchronize();
    member_->seat().meet(Call{}, threads::Offer{}, [](auto) {});
  }

  /// Compares a call over ranks that is made by other means. **Ranks** all. **Host** blocks until
  /// all have come.
  void agree(const Call& call) {
    member_->seat().meet(call, threads::Offer{}, [](auto) {});
  }

  /// **Ranks** this one. **Host** blocks until this rank's compute stream is empty, and all ranks
  /// have made the calls that it has made.
  void synchronize() { member_->synchronize(); }

  /// **Host** blocks until all ranks have made the call. **Stream** what any rank's compute stream
  /// is given next comes after what all of them hold at the call.
  void order_streams() {
    start(
        Call{}, nullptr, nullptr, false, [](Offers) {},
        [&](const threads::Lanes& lanes, Offers ranks, std::uint64_t ticket) {
          lanes.run(ranks, ticket, [](const threads::Lane&) {});
        })
        .wait();
  }

  /// data = op over ranks, on all ranks.
  template <class Data, class Op = Sum>
  void all_reduce(Data&& data, Op op = {}) {
    all_reduce_async(data, op).wait();
  }

  /// The same, asynchronously. **Host** does not block, unless the data is the host's: that is
  /// reduced at once. **Stream** only after `wait` of the handle does the compute stream wait for
  /// the result; the data belongs to the call until then.
  template <class Data, class Op = Sum>
  ThreadWork all_reduce_async(Data&& data, Op op = {}) {
    const auto values = flat(data);
    using T = typename decltype(values)::element_type;
    const std::size_t n = values.size();
    const Call call = arguments().template describe<T, Op>(CollectiveKind::all_reduce, n);
    return start(
        call, values.data(), values.data(), arguments().is_host(values),
        [&](Offers ranks) { threads::on_host::all_reduce<T>(ranks, n, op); },
        [&](const threads::Lanes& lanes, Offers ranks, std::uint64_t ticket) {
          threads::on_device::all_reduce<Ranks, T>(lanes, ranks, ticket, n, op);
        });
  }

  /// On `root`, data = op over ranks; elsewhere it keeps what it was.
  template <class Data, class Op = Sum>
  void reduce(Data&& data, Rank root, Op op = {}) {
    const auto values = flat(data);
    using T = typename decltype(values)::element_type;
    const std::size_t n = values.size();
    const Call call = arguments().template describe<T, Op>(CollectiveKind::reduce, n, root);
    start(
        call, values.data(), values.data(), arguments().is_host(values),
        [&](Offers ranks) { threads::on_host::reduce<T>(ranks, n, root, op); },
        [&](const threads::Lanes& lanes, Offers ranks, std::uint64_t ticket) {
          threads::on_device::reduce<Ranks, T>(lanes, ranks, ticket, n, root, op);
        })
        .wait();
  }

  /// data = root's data.
  template <class Data>
  void broadcast(Data&& data, Rank root) {
    const auto values = flat(data);
    using T = typename decltype(values)::element_type;
    const std::size_t n = values.size();
    const Call call = arguments().template describe<T>(CollectiveKind::broadcast, n, root);
    start(
        call, values.data(), values.data(), arguments().is_host(values),
        [&](Offers ranks) { threads::on_host::broadcast<T>(ranks, n, root); },
        [&](const threads::Lanes& lanes, Offers ranks, std::uint64_t ticket) {
          threads::on_device::broadcast(lanes, ranks, ticket, n * sizeof(T), root);
        })
        .wait();
  }

  /// out = every rank's in, one behind the other.
  template <class In, class Out>
  void all_gather(const In& in, Out&& out) {
    const auto from = flat(in);
    const auto to = flat(out);
    using T = typename decltype(to)::element_type;
    const std::size_t n = from.size();
    const Call call = arguments().template describe<T>(CollectiveKind::all_gather, n);
    arguments().check_size(call, to.size(), n * world());
    start(
        call, from.data(), to.data(), arguments().is_host(call, from, to),
        [&](Offers ranks) { threads::on_host::all_gather<T>(ranks, n); },
        [&](const threads::Lanes& lanes, Offers ranks, std::uint64_t ticket) {
          threads::on_device::all_gather(lanes, ranks, ticket, n * sizeof(T));
        })
        .wait();
  }

  /// On `root`, out = every rank's in; elsewhere out is not used.
  template <class In, class Out>
  void gather(const In& in, Out&& out, Rank root) {
    const auto from = flat(in);
    const auto to = flat(out);
    using T = typename decltype(to)::element_type;
    const std::size_t n = from.size();
    const Call call = arguments().template describe<T>(CollectiveKind::gather, n, root);
    const bool takes = rank() == root;
    if (takes) arguments().check_size(call, to.size(), n * world());
    start(
        call, from.data(), to.data(),
        takes ? arguments().is_host(call, from, to) : arguments().is_host(from),
        [&](Offers ranks) { threads::on_host::gather<T>(ranks, n, root); },
        [&](const threads::Lanes& lanes, Offers ranks, std::uint64_t ticket) {
          threads::on_device::gather(lanes, ranks, ticket, n * sizeof(T), root);
        })
        .wait();
  }

  /// out = this rank's piece of root's in. Elsewhere in is not used.
  template <class In, class Out>
  void scatter(const In& in, Out&& out, Rank root) {
    const auto from = flat(in);
    const auto to = flat(out);
    using T = typename decltype(to)::element_type;
    const std::size_t n = to.size();
    const Call call = arguments().template describe<T>(CollectiveKind::scatter, n, root);
    const bool gives = rank() == root;
    if (gives) arguments().check_size(call, from.size(), n * world());
    start(
        call, from.data(), to.data(),
        gives ? arguments().is_host(call, from, to) : arguments().is_host(to),
        [&](Offers ranks) { threads::on_host::scatter<T>(ranks, n, root); },
        [&](const threads::Lanes& lanes, Offers ranks, std::uint64_t ticket) {
          threads::on_device::scatter(lanes, ranks, ticket, n * sizeof(T), root);
        })
        .wait();
  }

  /// out = op over ranks of this rank's piece of in.
  template <class In, class Out, class Op = Sum>
  void reduce_scatter(const In& in, Out&& out, Op op = {}) {
    const auto from = flat(in);
    const auto to = flat(out);
    using T = typename decltype(to)::element_type;
    const std::size_t n = to.size();
    const Call call =
        arguments().template describe<T, Op>(CollectiveKind::reduce_scatter, from.size());
    arguments().check_size(call, from.size(), n * world());
    start(
        call, from.data(), to.data(), arguments().is_host(call, from, to),
        [&](Offers ranks) { threads::on_host::reduce_scatter<T>(ranks, n, op); },
        [&](const threads::Lanes& lanes, Offers ranks, std::uint64_t ticket) {
          threads::on_device::reduce_scatter<Ranks, T>(lanes, ranks, ticket, n, op);
        })
        .wait();
  }

  /// Piece w of out = piece `rank` of rank w's in. They must not overlap.
  template <class In, class Out>
  void all_to_all(const In& in, Out&& out) {
    const auto from = flat(in);
    const auto to = flat(out);
    using T = typename decltype(to)::element_type;
    const Call call = arguments().template describe<T>(CollectiveKind::all_to_all, from.size());
    arguments().check_size(call, from.size(), to.size());
    arguments().check_size(call, from.size() % world(), 0);
    const std::size_t n = from.size() / world();
    start(
        call, from.data(), to.data(), arguments().is_host(call, from, to),
        [&](Offers ranks) { threads::on_host::all_to_all<T>(ranks, n); },
        [&](const threads::Lanes& lanes, Offers ranks, std::uint64_t ticket) {
          threads::on_device::all_to_all(lanes, ranks, ticket, n * sizeof(T));
        })
        .wait();
  }

  /// Sends elements to one rank. **Ranks** this one, and `to` calls `receive`. **Host** blocks
  /// until it has. **Stream** in the compute stream's order.
  template <class Data>
  void send(const Data& data, Rank to) {
    const auto values = flat(data);
    using T = std::remove_const_t<typename decltype(values)::element_type>;
    arguments().check_peer("send", to);
    member_->send(make_call<T>(CollectiveKind::send, values.size(), false, to.value()),
                  values.data(), arguments().is_host(values), to);
  }

  /// Receives elements from one rank. **Ranks** this one, and `from` calls `send` with the same
  /// type and count. **Host** blocks until it has. **Stream** in the compute stream's order.
  template <class Data>
  void receive(Data&& data, Rank from) {
    const auto values = flat(data);
    using T = typename decltype(values)::element_type;
    arguments().check_peer("receive", from);
    member_->receive(make_call<T>(CollectiveKind::send, values.size(), false, rank().value()),
                     values.data(), values.size_bytes(), arguments().is_host(values), from);
  }

  /// Captures what `f` enqueues on the compute streams of all ranks, collectives included, as one
  /// graph of the whole world. Where that fails on any rank there is none on all, and the result
  /// says why; everything is then as before. **Ranks** all; they run `f` by turns. **Host** runs
  /// `f`. **Stream** nothing is run.
  template <class F>
  WorldStepGraph capture(F&& f) {
    return member_->capture(std::forward<F>(f));
  }

  /// Runs a captured step. **Ranks** all, with the graph of the same capture.
  void replay(const WorldStepGraph& graph) {
    Call call;
    call.kind = CollectiveKind::replay;
    if (!graph) {
      throw Error(call.text(), "there is no captured step: " + graph.reason(),
                  "run the step itself", rank());
    }
    start(
        call, &graph.graph(), nullptr, false, [](Offers) {},
        [&](const threads::Lanes& lanes, Offers ranks, std::uint64_t ticket) {
          for (const threads::Offer& other : ranks) {
            if (other.in == ranks[0].in) continue;
            throw Error(call.text(), "ranks replay steps of different captures",
                        "let every rank replay the same one", rank());
          }
          lanes.run(ranks, ticket, [&](const threads::Lane& lane) {
            if (&lane == &lanes.all().front()) graph.graph().launch(lane.stream);
          });
        })
        .wait();
  }

  /// The world of a group: what `new_group` makes communicators of. Nothing where this rank is not
  /// among the members. **Ranks** all, with the same list. **Host** blocks until all have come.
  std::shared_ptr<threads::SharedWorld> make_group_world(const std::vector<Rank>& members) {
    Call call;
    call.kind = CollectiveKind::new_group;
    call.count = members.size();
    std::shared_ptr<threads::SharedWorld> own;
    member_->seat().meet(call, {&members, &own, nullptr, true}, [&](Offers ranks) {
      for (const threads::Offer& other : ranks) {
        if (*static_cast<const std::vector<Rank>*>(other.in) == members) continue;
        throw Error(call.text(), "ranks list different members", "give all the same list", rank());
      }
      const auto made = std::make_shared<threads::SharedWorld>(WorldSize{members.size()});
      for (Rank who : members) {
        *static_cast<std::shared_ptr<threads::SharedWorld>*>(ranks[who.value()].out) = made;
      }
    });
    return own;
  }

  const std::shared_ptr<Gpu>& shared_gpu() const { return member_->gpu(); }

 private:
  using Offers = std::span<const threads::Offer>;

  template <class Joined>
  ThreadCommunicator(std::shared_ptr<threads::SharedWorld> world, Rank rank,
                     std::shared_ptr<Gpu> gpu, Milliseconds timeout, const Joined& joined) {
    require_world<Ranks>(WorldSize{world->calls->world()}, rank);
    member_ =
        std::make_unique<threads::Member>(std::move(world), rank, std::move(gpu), timeout, joined);
  }

  std::size_t world() const { return Ranks == dynamic ? member_->world() : Ranks; }
  GpuArguments arguments() const { return {{rank(), world_size()}}; }

  template <class OnHost, class OnDevice>
  ThreadWork start(const Call& call, const void* in, void* out, bool host, const OnHost& on_host,
                   const OnDevice& on_device) {
    if (host) {
      member_->run_on_host(call, in, out, on_host);
      return {};
    }
    return {*member_, member_->start(call, in, out, on_device), call};
  }

  std::unique_ptr<threads::Member> member_;
};

static_assert(ArenaAllocating<ThreadCommunicator<>> && AsyncReducing<ThreadCommunicator<2>>);
static_assert(ReduceScattering<ThreadCommunicator<>> && Scattering<ThreadCommunicator<>> &&
              Messaging<ThreadCommunicator<>>);

}  // namespace lockstep
