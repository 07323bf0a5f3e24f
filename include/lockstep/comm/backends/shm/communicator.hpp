// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Shm>`'s communicator: collectives of ranks that share a host's memory.

#include <algorithm>
#include <concepts>
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

#include "lockstep/comm/backend.hpp"
#include "lockstep/comm/backends/shm/engine.hpp"
#include "lockstep/comm/backends/shm/memory.hpp"
#include "lockstep/comm/call.hpp"
#include "lockstep/comm/call/counter.hpp"
#include "lockstep/comm/call/messages.hpp"
#include "lockstep/comm/collectives.hpp"
#include "lockstep/comm/combine.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/groups.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/launch/environment.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/launch/store.hpp"
#include "lockstep/topology/world.hpp"

namespace lockstep::detail::shm {

/// A rank has one outbox, which holds one piece at a time: messages leave in the order of sending,
/// and a piece must be received before the next is written.
inline void send(Engine& engine, const Call& call, std::span<const std::byte> bytes, Rank to) {
  Outbox& outbox = engine.block(engine.rank().value()).outbox;
  std::size_t done = 0;
  do {
    const std::uint64_t sent = outbox.sent.value.load(std::memory_order_relaxed);
    engine.wait(to.value(), outbox.received, sent, call);
    const std::size_t n = std::min(outbox.data.size(), bytes.size() - done);
    outbox.address.store((sent + 1) << 16 | to.value(), std::memory_order_relaxed);
    outbox.call = call;
    outbox.bytes = n;
    if (n != 0) std::memcpy(outbox.data.data(), bytes.data() + done, n);
    done += n;
    publish(outbox.sent, sent + 1);
  } while (done < bytes.size());
}

inline void receive(Engine& engine, const Call& call, std::span<std::byte> bytes, Rank from) {
  Outbox& outbox = engine.block(from.value()).outbox;
  for (std::size_t done = 0;;) {
    const std::uint64_t piece = outbox.received.value.load(std::memory_order_acquire) + 1;
    engine.wait(from.value(), outbox.sent, piece, call);
    const std::uint64_t address = outbox.address.load(std::memory_order_acquire);
    if (address >> 16 != piece) continue;  // its receiver has taken it meanwhile
    if ((address & 0xffff) != engine.rank().value()) {
      engine.wait(from.value(), outbox.received, piece, call);
      continue;
    }
    if (!outbox.call.carries_the_same_as(call))
      engine.fail(messages_differ(call, from, outbox.call.text(), engine.rank()));
    if (outbox.bytes != 0) std::memcpy(bytes.data() + done, outbox.data.data(), outbox.bytes);
    done += outbox.bytes;
    publish(outbox.received, piece);
    if (done >= bytes.size()) return;
  }
}

/// Where all ranks' data of a call is. `Ranks` is the world's size where the compiler knows it.
template <std::size_t Ranks>
class RankData {
 public:
  explicit RankData(Engine& engine) : engine_(&engine) {}

  Rank rank() const { return engine_->rank(); }
  std::size_t me() const { return rank().value(); }
  std::size_t world() const { return Ranks == dynamic ? engine_->world() : Ranks; }

  // Rank w's data: in its slot, its arena or its staging area.

  template <class T>
  auto in_slots(std::uint64_t ticket) const {
    return [engine = engine_, ticket](std::size_t w) {
      return reinterpret_cast<T*>(engine->slot(w, ticket).data.data());
    };
  }
  template <class T>
  auto in_arenas(std::uint64_t ticket) const {
    return [engine = engine_, ticket](std::size_t w) {
      return reinterpret_cast<T*>(engine->arenas().at(engine->slot(w, ticket).offset));
    };
  }
  template <class T>
  auto in_staging() const {
    return [engine = engine_](std::size_t w) {
      return reinterpret_cast<T*>(engine->block(w).staging.data());
    };
  }

  /// All ranks' data, looked up once.
  template <class T, class Source>
  std::vector<T*> all(const Source& source) const {
    std::vector<T*> data(world());
    for (std::size_t w = 0; w < data.size(); ++w) data[w] = source(w);
    return data;
  }

  /// All-reduces this rank's slice of all ranks' data, in place.
  template <class T, class Op>
  void push_own_slice(const std::vector<T*>& data, std::size_t count, const Op& op) const {
    const auto [begin, end] = slice_of<T>(count, me(), world());
    push<Ranks, T>(data, begin, end, op);
  }

 private:
  Engine* engine_;
};

}  // namespace lockstep::detail::shm

namespace lockstep {

/// Collectives through shared memory, for processes of one host or threads of one process. `Ranks`
/// is the world's size where the compiler knows it: reductions are unrolled over it.
///
/// Results are the same bits on all ranks and in every run: values are combined in rank order, each
/// element by one rank. Every call is compared over ranks before anything is written.
///
/// Memory from `allocate` is worked on where it lies. Other memory is staged, piece by piece; such
/// data cannot be worked on in the background, so that an asynchronous call reduces it at once.
///
/// **Host** every collective blocks until the result is here and the arguments may be used again; a
/// message of up to 64 KiB may be buffered. **Stream** none: host memory only.
template <std::size_t Ranks = dynamic, class Who = Callers>
class ShmCommunicator : public Collectives<ShmCommunicator<Ranks, Who>> {
 public:
  using Milliseconds = std::chrono::milliseconds;

  /// With more calls under way than this, a new one waits for the oldest.
  static constexpr std::size_t most_under_way = detail::shm::ring;

  /// Joins a world through a file that one rank made (`Engine::make_file`) and all opened.
  ShmCommunicator(Rank rank, WorldSize world, detail::shm::MemoryFile file, Milliseconds timeout)
      : engine_(std::make_unique<Engine>(rank, world, std::move(file), timeout)) {
    detail::require_world<Ranks>(world, rank);
    this->barrier();
    if constexpr (has_helper) helper_ = std::make_unique<detail::shm::Helper>(*engine_);
  }

  ShmCommunicator(ShmCommunicator&&) noexcept = default;
  ShmCommunicator& operator=(ShmCommunicator&&) = delete;

  /// Joins by any means that brings a text from rank 0 (`tell(text)`) to the others (`hear()`).
  template <class Tell, class Hear>
  static ShmCommunicator join(Rank rank, WorldSize world, Milliseconds timeout, const Tell& tell,
                              const Hear& hear) {
    detail::require_world<Ranks>(world, rank);  // fails before the others wait for a file
    detail::shm::MemoryFile file;
    if (rank == Rank{0}) {
      file = Engine::make_file(world);
      tell(Engine::address(file));
    } else {
      file = Engine::open(hear());
    }
    return ShmCommunicator(rank, world, std::move(file), timeout);
  }

  Rank rank() const { return engine_->rank(); }
  WorldSize world_size() const { return WorldSize{peers().world()}; }
  Milliseconds timeout() const { return engine_->timeout(); }
  void set_timeout(Milliseconds timeout) { engine_->set_timeout(timeout); }

  /// `count` elements that every rank can see, zeroed. The memory lives as long as the
  /// communicator.
  /// **Ranks** all, with the same count.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    const Lock lock(*engine_);
    return {reinterpret_cast<T*>(engine_->allocate(count * sizeof(T))), count};
  }

  /// `count` elements that all ranks have in common, zeroed. **Ranks** all, with the same count.
  template <Element T>
  std::span<T> allocate_shared(std::size_t count) {
    const Lock lock(*engine_);
    return {reinterpret_cast<T*>(engine_->allocate_shared(count * sizeof(T))), count};
  }

  /// Gives up: every other rank's call fails with this reason.
  void abandon(std::string_view reason) {
    const Lock lock(*engine_);
    engine_->abandon(reason);
  }

  /// The elements [begin, end) of `count` that are this rank's to combine in `reduce_slice`.
  template <Element T>
  std::pair<std::size_t, std::size_t> slice(std::size_t count) const {
    return detail::slice_of<T>(count, peers().me(), peers().world());
  }

  /// Combines this rank's slice of `data`, which is in an arena, over ranks, and hands the results
  /// to `consume(begin, results)`, block by block, while they are in the cache; one that can is
  /// also given all ranks' data, in the order of ranks. No data is changed. Returns when all ranks
  /// have consumed theirs. **Ranks** all.
  template <class Data, class Op, class Consume>
  void reduce_slice(Data&& data, Op op, const Consume& consume,
                    detail::JobCall part_of = detail::current_job_call()) {
    const auto values = flat(data);
    using T = detail::FlatElement<Data>;
    static_assert(ReduceOp<Op, T>,
                  "lockstep: this reduce operation is not defined for these elements");
    detail::Call call =
        detail::calls::ReduceScatter<T, Op>{values, {}, values.size(), Rank{0}, op, part_of}.call();
    const auto offset = engine_->arenas().locate(values.data(), values.size_bytes());
    if (!offset) {
      throw Error(call.text(), "the data is not in memory from allocate",
                  "reduce slices of arenas only", rank());
    }
    post<T>(call, {}, *offset, true, [&](std::uint64_t ticket) {
      const auto [begin, end] = slice<T>(values.size());
      const auto all = peers().template all<T>(peers().template in_arenas<T>(ticket));
      detail::consume_blocks<Ranks, T>(
          all, begin, end, op, [&](std::size_t at, std::span<const T> results) {
            if constexpr (requires { consume(at, results, std::span<T* const>(all)); }) {
              consume(at, results, std::span<T* const>(all));
            } else {
              consume(at, results);
            }
          });
    }).wait();
  }

  // For the front.

  template <class C>
  void perform(const C& call) {
    if constexpr (C::kind == detail::CollectiveKind::send) {
      const Lock lock(*engine_);
      detail::shm::send(*engine_, call.call(), std::as_bytes(call.in), call.root);
    } else if constexpr (C::kind == detail::CollectiveKind::receive) {
      const Lock lock(*engine_);
      detail::shm::receive(*engine_, call.call(), std::as_writable_bytes(call.out), call.root);
    } else if constexpr (C::kind == detail::CollectiveKind::barrier) {
      agree(call.call());
    } else if (const auto offset = location(call)) {
      begin(call, *offset).wait();
    } else {
      make_staged(call);
    }
  }

  /// Memory outside of arenas is worked on at once, and the handle is of an empty call.
  template <class C>
  auto start(const C& call) {
    const auto offset = location(call);
    if (!offset) make_staged(call);
    return begin(offset ? call : call.on({}, {}, 0), offset.value_or(0));
  }

  /// Compares a call over ranks that something else makes.
  void agree(const detail::Call& call) {
    post<std::uint8_t>(call, {}, 0, false, [](std::uint64_t) {}).wait();
  }

  /// The communicator of this rank's group, if it is in one.
  template <std::size_t GroupRanks>
  std::optional<ShmCommunicator<GroupRanks>> split(const detail::GroupPlace& place) {
    agree(detail::division_call(place));
    detail::shm::MemoryFile file;
    std::string address;
    if (place.is_member() && place.rank == Rank{0}) {
      file = Engine::make_file(place.world());
      address = Engine::address(file);
    }
    const std::vector<std::string> addresses = all_gather_objects(*this, address);
    std::optional<ShmCommunicator<GroupRanks>> group;
    if (place.is_member()) {
      if (place.rank != Rank{0}) file = Engine::open(addresses[place.leader().value()]);
      group.emplace(place.rank, place.world(), std::move(file), timeout());
    }
    this->barrier();  // the leader's file stays open until all have opened it
    return group;
  }

 private:
  using Engine = detail::shm::Engine;
  static constexpr bool has_helper = std::same_as<Who, HelperThread>;
  using Lock = detail::shm::EngineLock<has_helper>;

  detail::shm::RankData<Ranks> peers() const { return detail::shm::RankData<Ranks>(*engine_); }

  template <class T>
  static constexpr bool is_small(std::size_t count) {
    return count * sizeof(T) <= detail::shm::small_bytes;
  }

  /// The pieces of what a rank gives.
  template <class C>
  std::size_t pieces() const {
    return C::deals_pieces ? peers().world() : 1;
  }

  /// The offset at which other ranks find the data; 0 for small data, which travels in the slot;
  /// nothing for memory outside of arenas. All ranks must use the same kind of memory, also those
  /// that give nothing: a rank that cannot know where the root's memory is stages what is
  /// scattered.
  template <class C>
  std::optional<std::uint64_t> location(const C& call) const {
    using T = typename C::element;
    if constexpr (C::kind == detail::CollectiveKind::scatter) {
      if (!is_small<T>(pieces<C>() * call.count)) return std::nullopt;
    }
    std::span<const T> data = call.in;
    if constexpr (C::is_in_place) data = call.data();
    if (is_small<T>(data.size())) return 0;
    return engine_->arenas().locate(data.data(), data.size_bytes());
  }

  /// Posts a call: `small` travels in the slot, `offset` says where other data lies, and
  /// `execute(ticket)` is this rank's share of the work. `others_read` as in `Pending`.
  template <class T, class Execute>
  auto post(const detail::Call& call, std::span<const T> small, std::uint64_t offset,
            bool others_read, const Execute& execute) {
    return Work<detail::shm::Pending<Execute, has_helper>>(
        std::in_place, *engine_, call, offset,
        [&](detail::shm::Slot& slot) {
          if (!small.empty()) std::memcpy(slot.data.data(), small.data(), small.size_bytes());
        },
        others_read, execute);
  }

  template <class C>
  static constexpr bool pushes = C::kind == detail::CollectiveKind::all_reduce;

  /// Starts a call whose data is small or lies in arenas, this rank's at `offset`: each rank offers
  /// what it gives, then takes what it needs of the others. Of an all-reduce that is not small,
  /// each rank loads its slice of all ranks' data, combines it in registers and stores it to all.
  template <class C>
  auto begin(const C& call, std::uint64_t offset) {
    using T = typename C::element;
    const bool small = is_small<T>(pieces<C>() * call.count);
    const auto work = [peers = peers(), call, small](std::uint64_t ticket) {
      const auto take = [&](const auto& source) {
        detail::take_from_all<Ranks>(call, peers.rank(), peers.world(), source, call.count, 0,
                                     call.count);
      };
      if (small) {
        take(peers.template in_slots<T>(ticket));
      } else if constexpr (pushes<C>) {
        peers.push_own_slice(peers.template all<T>(peers.template in_arenas<T>(ticket)), call.count,
                             call.op);
      } else {
        take(peers.template in_arenas<T>(ticket));
      }
    };
    return post<T>(call.call(), small ? call.in : std::span<const T>(), offset, !small, work);
  }

  /// Makes a call of private memory, as much at a time as the staging area holds.
  template <class C>
  void make_staged(const C& call) {
    using T = typename C::element;
    const auto peers = this->peers();
    const auto source = peers.template in_staging<T>();
    detail::Call described = call.call();
    described.staged = true;
    const std::size_t rows = pieces<C>();
    const std::size_t most =
        std::max<std::size_t>(1, detail::shm::staging_bytes / sizeof(T) / rows);
    T* const staging = source(peers.me());
    for (std::size_t begin = 0; begin < call.count; begin += most) {
      const std::size_t n = std::min(most, call.count - begin);
      for (std::size_t p = 0; p < rows && !call.in.empty(); ++p)
        detail::copy_elements(call.in.data() + p * call.count + begin, staging + p * n, n);
      post<T>(described, {}, 0, true, [&](std::uint64_t) {
        if constexpr (pushes<C>) {
          peers.push_own_slice(peers.template all<T>(source), n, call.op);
        } else {
          detail::take_from_all<Ranks>(call, peers.rank(), peers.world(), source, n, begin, n);
        }
      }).wait();
      if constexpr (pushes<C>) detail::copy_elements(staging, call.out.data() + begin, n);
    }
  }

  std::unique_ptr<Engine> engine_;
  std::unique_ptr<detail::shm::Helper> helper_;  // ends before the engine does
};

static_assert(ArenaAllocating<ShmCommunicator<>> && AsyncReducing<ShmCommunicator<2>>);
static_assert(MemorySharing<ShmCommunicator<>> && Splitting<ShmCommunicator<>>);
static_assert(AsyncReducing<ShmCommunicator<dynamic, HelperThread>>);

/// The shared-memory communicator of a job's ranks. `name` tells several of one job apart.
/// **Ranks** all.
/// **Host** blocks until all have come.
template <std::size_t Ranks = dynamic, class Who = Callers>
ShmCommunicator<Ranks, Who> make_shm_communicator(const Membership& member, Store& store,
                                                  const std::string& name = "world") {
  if (member.local_world != member.world.value()) {
    throw Error("shared memory",
                "of the job's " + std::to_string(member.world.value()) + " ranks, " +
                    std::to_string(member.local_world) + " are on this host",
                "Backend<Shm> is for the ranks of one host", member.rank);
  }
  const std::string key =
      "lockstep/shm/" + detail::numbered_meeting(store, member.rank, "shm", name);
  return ShmCommunicator<Ranks, Who>::join(
      member.rank, member.world, member.timeout,
      [&](const std::string& address) { store.set(key, address); },
      [&] { return store.get(key, member.timeout); });
}

}  // namespace lockstep
