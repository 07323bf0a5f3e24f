// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Shm>`'s communicator: collectives of ranks that share a host's memory.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/progress.hpp"
#include "lockstep/comm/shm/all_reduce.hpp"
#include "lockstep/comm/shm/engine.hpp"
#include "lockstep/comm/shm/gather.hpp"
#include "lockstep/comm/shm/helper.hpp"
#include "lockstep/comm/shm/message.hpp"
#include "lockstep/comm/shm/peers.hpp"
#include "lockstep/comm/shm/reduce_slice.hpp"
#include "lockstep/comm/shm/rooted.hpp"
#include "lockstep/comm/shm/scatter.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/flat.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/topology/world.hpp"

namespace lockstep {

/// Collectives through shared memory, for processes of one host or threads of one process. `Ranks`
/// is the world's size where the compiler knows it: reductions are unrolled over it.
///
/// Results are the same bits on all ranks and in every run: values are combined in rank order, each
/// element by one rank. Every call is compared over ranks before anything is written.
///
/// Memory from `allocate` is worked on where it lies. Other memory is staged, piece by piece.
///
/// Every collective, unless it says otherwise: **Ranks** all of them, in the same order. **Host**
/// blocks until the result is here and the arguments may be used again. **Stream** none: host
/// memory only.
template <std::size_t Ranks = dynamic, class Who = Callers>
class ShmCommunicator {
 public:
  /// With more calls under way than this, a new one waits for the oldest.
  static constexpr std::size_t most_under_way = shm::ring;

  /// Joins a world through a file that one rank made (`shm::Engine::make_file`) and all opened.
  ShmCommunicator(Rank rank, WorldSize world, shm::MemoryFile file, shm::Milliseconds timeout)
      : engine_(std::make_unique<shm::Engine>(rank, world, std::move(file), timeout)) {
    require_world<Ranks>(world, rank);
    barrier();
    if constexpr (has_helper) helper_ = std::make_unique<shm::Helper>(*engine_);
  }

  ShmCommunicator(ShmCommunicator&&) noexcept = default;
  ShmCommunicator& operator=(ShmCommunicator&&) = delete;

  /// Joins through anything that can tell one rank's words to all: `tell(text)` on rank 0, `hear()`
  /// on the others.
  template <class Tell, class Hear>
  static ShmCommunicator join(Rank rank, WorldSize world, shm::Milliseconds timeout,
                              const Tell& tell, const Hear& hear) {
    require_world<Ranks>(world, rank);  // before there is a file that the others could miss
    shm::MemoryFile file;
    if (rank == Rank{0}) {
      file = shm::Engine::make_file(world);
      tell(shm::Engine::address(file));
    } else {
      file = shm::Engine::open(hear());
    }
    return ShmCommunicator(rank, world, std::move(file), timeout);
  }

  Rank rank() const { return peers().rank(); }
  WorldSize world_size() const { return WorldSize{peers().world()}; }
  shm::Milliseconds timeout() const { return engine_->timeout(); }
  void set_timeout(shm::Milliseconds timeout) { engine_->set_timeout(timeout); }

  /// `count` elements that every rank can see, zeroed. Ranks: all, with the same count. The memory
  /// lives as long as the communicator.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    const shm::Turn<has_helper> turn(*engine_);
    return {reinterpret_cast<T*>(engine_->allocate(count * sizeof(T))), count};
  }

  /// `count` elements that all ranks have in common, zeroed. Ranks: all, with the same count.
  template <Element T>
  std::span<T> allocate_shared(std::size_t count) {
    const shm::Turn<has_helper> turn(*engine_);
    return {reinterpret_cast<T*>(engine_->allocate_shared(count * sizeof(T))), count};
  }

  /// Gives up: every other rank's call fails with this reason.
  void abandon(std::string_view reason) {
    const shm::Turn<has_helper> turn(*engine_);
    engine_->abandon(reason);
  }

  void barrier() {
    peers().post(Call{}, std::span<const std::uint8_t>(), false, [](std::uint64_t) {}).wait();
  }

  /// A barrier with a time limit of its own, whose error lists every rank that is missing.
  void monitored_barrier(shm::Milliseconds timeout) {
    const shm::Milliseconds usual = engine_->timeout();
    engine_->set_timeout(timeout);
    barrier();
    engine_->set_timeout(usual);
  }

  /// data = op over ranks, on all ranks.
  template <class Data, class Op = Sum>
  void all_reduce(Data&& data, Op op = {}) {
    shm::all_reduce(peers(), flat(data), op);
  }

  /// The same, asynchronously. Host: returns at once; `test` and `wait` of the handle, and any
  /// other call of this communicator, carry it on. The data belongs to the call until it is done.
  /// Data that is neither small nor in an arena cannot be worked on in the background and is
  /// reduced at once.
  template <class Data, class Op = Sum>
  auto all_reduce_async(Data&& data, Op op = {}) {
    return shm::all_reduce_async(peers(), flat(data), op);
  }

  /// On `root`, data = op over ranks; elsewhere it keeps what it was.
  template <class Data, class Op = Sum>
  void reduce(Data&& data, Rank root, Op op = {}) {
    shm::reduce(peers(), flat(data), root, op);
  }

  /// data = root's data.
  template <class Data>
  void broadcast(Data&& data, Rank root) {
    shm::broadcast(peers(), flat(data), root);
  }

  /// out = every rank's in, one behind the other.
  template <class In, class Out>
  void all_gather(const In& in, Out&& out) {
    shm::all_gather(peers(), flat(in), flat(out));
  }

  /// On `root`, out = every rank's in; elsewhere out is not used.
  template <class In, class Out>
  void gather(const In& in, Out&& out, Rank root) {
    shm::gather(peers(), flat(in), flat(out), root);
  }

  /// out = this rank's piece of root's in. Elsewhere in is not used.
  template <class In, class Out>
  void scatter(const In& in, Out&& out, Rank root) {
    shm::scatter(peers(), flat(in), flat(out), root);
  }

  /// out = op over ranks of this rank's piece of in.
  template <class In, class Out, class Op = Sum>
  void reduce_scatter(const In& in, Out&& out, Op op = {}) {
    shm::reduce_scatter(peers(), flat(in), flat(out), op);
  }

  /// The elements [begin, end) of `count` that are this rank's to combine in `reduce_slice`.
  template <Element T>
  std::pair<std::size_t, std::size_t> slice(std::size_t count) const {
    return shm::slice<T>(count, peers().me(), peers().world());
  }

  /// Combines this rank's slice of `data`, which is in an arena, over ranks, and hands the results
  /// to `consume(begin, results)`, block by block, while they are in the cache. No data is changed.
  /// Returns when all ranks have consumed theirs.
  template <class Data, class Op, class Consume>
  void reduce_slice(Data&& data, Op op, const Consume& consume) {
    shm::reduce_slice(peers(), flat(data), op, consume);
  }

  /// Piece w of out = piece `rank` of rank w's in.
  template <class In, class Out>
  void all_to_all(const In& in, Out&& out) {
    shm::all_to_all(peers(), flat(in), flat(out));
  }

  /// Sends elements to one rank. **Ranks** this one, and `to` calls `receive`. **Host** blocks
  /// until the last piece is on its way: a message of up to 64 KiB may be buffered.
  template <class Data>
  void send(const Data& data, Rank to) {
    const auto values = flat(data);
    using T = std::remove_const_t<typename decltype(values)::element_type>;
    peers().arguments().check_peer("send", to);
    shm::send(*engine_, make_call<T>(CollectiveKind::send, values.size(), false, to.value()),
              std::as_bytes(values), to);
  }

  /// Receives elements from one rank. **Ranks** this one, and `from` calls `send` with the same
  /// type and count. **Host** blocks until they are here.
  template <class Data>
  void receive(Data&& data, Rank from) {
    const auto values = flat(data);
    using T = typename decltype(values)::element_type;
    peers().arguments().check_peer("receive", from);
    shm::receive(*engine_, make_call<T>(CollectiveKind::send, values.size(), false, rank().value()),
                 std::as_writable_bytes(values), from);
  }

 private:
  static constexpr bool has_helper = std::same_as<Who, HelperThread>;

  shm::Peers<Ranks, has_helper> peers() const { return shm::Peers<Ranks, has_helper>(*engine_); }

  std::unique_ptr<shm::Engine> engine_;
  std::unique_ptr<shm::Helper> helper_;  // ends before the engine does
};

static_assert(ArenaAllocating<ShmCommunicator<>> && AsyncReducing<ShmCommunicator<2>>);
static_assert(ReduceScattering<ShmCommunicator<>> && Scattering<ShmCommunicator<>> &&
              Messaging<ShmCommunicator<>>);
static_assert(MemorySharing<ShmCommunicator<>>);
static_assert(AsyncReducing<ShmCommunicator<dynamic, HelperThread>>);

}  // namespace lockstep
