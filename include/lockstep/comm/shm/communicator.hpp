// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Shm>`'s communicator: collectives of ranks that share a host's memory.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/progress.hpp"
#include "lockstep/comm/shm/control.hpp"
#include "lockstep/comm/shm/engine.hpp"
#include "lockstep/comm/shm/helper.hpp"
#include "lockstep/comm/shm/message.hpp"
#include "lockstep/comm/shm/reduce.hpp"
#include "lockstep/comm/shm/work.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/flat.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"

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
  /// Joins a world through a file that one rank made (`shm::Engine::make_file`) and all opened.
  ShmCommunicator(Rank rank, WorldSize world, shm::MemoryFile file, shm::Milliseconds timeout)
      : engine_(std::make_unique<shm::Engine>(rank, world, std::move(file), timeout)) {
    if (Ranks != dynamic && Ranks != world.value()) {
      throw Error("shared memory",
                  "the program is for " + std::to_string(Ranks) + " ranks and the job has " +
                      std::to_string(world.value()),
                  "start as many ranks as World<N> says, or use World<dynamic>", rank);
    }
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
    shm::MemoryFile file;
    if (rank == Rank{0}) {
      file = shm::Engine::make_file(world);
      tell(shm::Engine::address(file));
    } else {
      file = shm::Engine::open(hear());
    }
    return ShmCommunicator(rank, world, std::move(file), timeout);
  }

  Rank rank() const { return Rank{me()}; }
  WorldSize world_size() const { return WorldSize{world()}; }
  shm::Milliseconds timeout() const { return engine_->timeout(); }
  void set_timeout(shm::Milliseconds timeout) { engine_->set_timeout(timeout); }

  /// `count` elements that every rank can see, zeroed. Ranks: all, with the same count. The memory
  /// lives as long as the communicator.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    const shm::Turn<has_helper> turn(*engine_);
    return {reinterpret_cast<T*>(engine_->allocate(count * sizeof(T))), count};
  }

  void barrier() {
    make_work(Call{}, nothing<std::uint8_t>, false, [](std::uint64_t) {}).wait();
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
    const auto values = flat(data);
    if (const auto offset = location(values)) {
      all_reduce_work(values, op, *offset).wait();
    } else {
      all_reduce_staged(values, op);
    }
  }

  /// The same, asynchronously. Host: returns at once; `test` and `wait` of the handle, and any
  /// other call of this communicator, carry it on. The data belongs to the call until it is done.
  /// Data that is neither small nor in an arena cannot be worked on in the background and is
  /// reduced at once.
  template <class Data, class Op = Sum>
  auto all_reduce_async(Data&& data, Op op = {}) {
    const auto values = flat(data);
    const auto offset = location(values);
    if (!offset) all_reduce_staged(values, op);
    return all_reduce_work(offset ? values : values.first(0), op, offset.value_or(0));
  }

  /// On `root`, data = op over ranks; elsewhere it keeps what it was.
  template <class Data, class Op = Sum>
  void reduce(Data&& data, Rank root, Op op = {}) {
    const auto values = flat(data);
    using T = typename decltype(values)::element_type;
    Call call = describe<T>(CollectiveKind::reduce, values, root);
    call.with(Op::name);
    exchange(call, std::span<const T>(values), 1, values.size(),
             [&](const auto& source, std::size_t, std::size_t begin, std::size_t n) {
               if (rank() != root) return;
               shm::combine_blocks<Ranks, T>(
                   world(), 0, n, op, source, [&](std::size_t i, std::span<const T> results) {
                     std::copy(results.begin(), results.end(), &values[begin + i]);
                   });
             });
  }

  /// data = root's data.
  template <class Data>
  void broadcast(Data&& data, Rank root) {
    const auto values = flat(data);
    using T = typename decltype(values)::element_type;
    exchange(describe<T>(CollectiveKind::broadcast, values, root), std::span<const T>(values), 1,
             values.size(), [&](const auto& source, std::size_t, std::size_t begin, std::size_t n) {
               if (rank() != root) copy(source(root.value()), values.data() + begin, n);
             });
  }

  /// out = every rank's in, one behind the other.
  template <class In, class Out>
  void all_gather(const In& in, Out&& out) {
    gather_into(CollectiveKind::all_gather, in, out, Rank{0}, true);
  }

  /// On `root`, out = every rank's in; elsewhere out is not used.
  template <class In, class Out>
  void gather(const In& in, Out&& out, Rank root) {
    gather_into(CollectiveKind::gather, in, out, root, rank() == root);
  }

  /// out = this rank's piece of root's in. Elsewhere in is not used.
  template <class In, class Out>
  void scatter(const In& in, Out&& out, Rank root) {
    const auto pieces = flat(in);
    const auto piece = flat(out);
    using T = typename decltype(piece)::element_type;
    Call call = describe<T>(CollectiveKind::scatter, piece, root);
    call.staged =
        !is_small<T>(piece.size() * world());  // who has no `in` cannot know where root's lies
    const std::span<const T> mine =
        rank() == root ? std::span<const T>(pieces) : std::span<const T>();
    if (rank() == root) check_size(call, pieces.size(), piece.size() * world());
    exchange(call, mine, world(), piece.size(),
             [&](const auto& source, std::size_t stride, std::size_t begin, std::size_t n) {
               copy(source(root.value()) + me() * stride, piece.data() + begin, n);
             });
  }

  /// out = op over ranks of this rank's piece of in.
  template <class In, class Out, class Op = Sum>
  void reduce_scatter(const In& in, Out&& out, Op op = {}) {
    const auto pieces = flat(in);
    const auto piece = flat(out);
    using T = typename decltype(piece)::element_type;
    Call call = describe<T>(CollectiveKind::reduce_scatter, pieces, Rank{0});
    call.with(Op::name);
    check_size(call, pieces.size(), piece.size() * world());
    exchange(call, std::span<const T>(pieces), world(), piece.size(),
             [&](const auto& source, std::size_t stride, std::size_t begin, std::size_t n) {
               shm::combine_blocks<Ranks, T>(
                   world(), 0, n, op, [&](std::size_t w) { return source(w) + me() * stride; },
                   [&](std::size_t i, std::span<const T> results) {
                     std::copy(results.begin(), results.end(), &piece[begin + i]);
                   });
             });
  }

  /// Piece w of out = piece `rank` of rank w's in.
  template <class In, class Out>
  void all_to_all(const In& in, Out&& out) {
    const auto sent = flat(in);
    const auto received = flat(out);
    using T = typename decltype(received)::element_type;
    const Call call = describe<T>(CollectiveKind::all_to_all, sent, Rank{0});
    check_size(call, sent.size(), received.size());
    check_size(call, sent.size() % world(), 0);
    const std::size_t each = sent.size() / world();
    exchange(call, std::span<const T>(sent), world(), each,
             [&](const auto& source, std::size_t stride, std::size_t begin, std::size_t n) {
               for (std::size_t w = 0; w < world(); ++w) {
                 copy(source(w) + me() * stride, received.data() + w * each + begin, n);
               }
             });
  }

  /// Sends elements to one rank. **Ranks** this one, and `to` calls `receive`. **Host** blocks
  /// until the last piece is on its way: a message of up to 64 KiB may be buffered.
  template <class Data>
  void send(const Data& data, Rank to) {
    const auto values = flat(data);
    using T = std::remove_const_t<typename decltype(values)::element_type>;
    check_peer("send", to);
    shm::send(*engine_, make_call<T>(CollectiveKind::send, values.size(), false, to.value()),
              std::as_bytes(values), to);
  }

  /// Receives elements from one rank. **Ranks** this one, and `from` calls `send` with the same
  /// type and count. **Host** blocks until they are here.
  template <class Data>
  void receive(Data&& data, Rank from) {
    const auto values = flat(data);
    using T = typename decltype(values)::element_type;
    check_peer("receive", from);
    shm::receive(*engine_, make_call<T>(CollectiveKind::send, values.size(), false, me()),
                 std::as_writable_bytes(values), from);
  }

 private:
  void check_peer(const char* operation, Rank peer) const {
    if (peer.value() < world() && peer != rank()) return;
    throw Error(operation,
                "rank " + std::to_string(peer.value()) + " is not another rank of this world",
                "give one below " + std::to_string(world()), rank());
  }

  std::size_t me() const { return engine_->rank(); }
  std::size_t world() const { return Ranks == dynamic ? engine_->world() : Ranks; }

  template <class T>
  static constexpr std::span<const T> nothing{};

  template <class T>
  static bool is_small(std::size_t count) {
    return count * sizeof(T) <= shm::small_bytes;
  }

  /// Where other ranks find the data: anywhere if it is small (it travels in the slot), else in an
  /// arena.
  template <class T>
  std::optional<std::uint64_t> location(std::span<T> data) const {
    if (is_small<T>(data.size())) return 0;
    return engine_->locate(data.data(), data.size_bytes());
  }

  template <class T, class U>
  Call describe(CollectiveKind kind, std::span<U> data, Rank root) const {
    static_assert(std::same_as<std::remove_const_t<U>, T>,
                  "lockstep: a collective's arguments have one element type");
    static_assert(Element<T>,
                  "lockstep: collectives move double, float, Half, BFloat16 and integers");
    if (root.value() >= world()) {
      throw Error(std::string(collective_name(kind)),
                  "root " + std::to_string(root.value()) + " is not in the world",
                  "give a rank below " + std::to_string(world()), rank());
    }
    return make_call<T>(kind, data.size(), !location(data), root.value());
  }

  void check_size(const Call& call, std::size_t have, std::size_t want) const {
    if (have == want) return;
    throw Error(call.text(),
                "sizes do not fit: " + std::to_string(have) + " elements where " +
                    std::to_string(want) + " are needed",
                "one argument holds a piece for every rank, the other one piece", rank());
  }

  template <class T>
  static void copy(const T* from, T* to, std::size_t count) {
    if (from != to && count != 0) std::memmove(to, from, count * sizeof(T));
  }

  template <class T, class Execute>
  auto make_work(const Call& call, std::span<const T> small, bool others_read, Execute execute,
                 std::uint64_t offset = 0) {
    return shm::Work<Execute, has_helper>(
        *engine_, call, offset,
        [&](shm::Slot& slot) {
          if (!small.empty()) std::memcpy(slot.data.data(), small.data(), small.size_bytes());
        },
        others_read, execute);
  }

  /// Rank w's data for a call: in its slot, its arena or its staging area.
  template <class T>
  auto small_source(std::uint64_t ticket) const {
    return [this, ticket](std::size_t w) {
      return reinterpret_cast<T*>(engine_->slot(w, ticket).data.data());
    };
  }
  template <class T>
  auto arena_source(std::uint64_t ticket) const {
    return [this, ticket](std::size_t w) {
      return reinterpret_cast<T*>(engine_->at(engine_->slot(w, ticket).offset));
    };
  }
  template <class T>
  auto staging_source() const {
    return [this](std::size_t w) { return reinterpret_cast<T*>(engine_->block(w).staging.data()); };
  }

  /// The all-reduce of data that is small or in an arena: of the latter, each rank loads its slice
  /// of everybody's data, combines it in registers and stores it to everybody.
  template <class T, class Op>
  auto all_reduce_work(std::span<T> values, Op op, std::uint64_t offset) {
    static_assert(ReduceOp<Op, T>,
                  "lockstep: this reduce operation is not defined for these elements");
    const bool small = is_small<T>(values.size());
    return make_work(
        make_call<T>(CollectiveKind::all_reduce, values.size(), false, 0, Op::name),
        small ? std::span<const T>(values) : nothing<T>, !small,
        [this, values, op, small](std::uint64_t ticket) {
          if (small) {
            shm::combine_blocks<Ranks, T>(world(), 0, values.size(), op, small_source<T>(ticket),
                                          [&](std::size_t i, std::span<const T> results) {
                                            std::copy(results.begin(), results.end(), &values[i]);
                                          });
          } else {
            push_slice<T>(op, arena_targets<T>(ticket), values.size());
          }
        },
        offset);
  }

  /// Everybody's data, looked up once.
  template <class T>
  auto arena_targets(std::uint64_t ticket) const {
    std::vector<T*> targets(world());
    for (std::size_t w = 0; w < world(); ++w) targets[w] = arena_source<T>(ticket)(w);
    return targets;
  }

  template <class T, class Op>
  void push_slice(const Op& op, const std::vector<T*>& targets, std::size_t count) const {
    const auto [begin, end] = shm::slice<T>(count, me(), world());
    shm::push<Ranks, T>(targets, begin, end, op);
  }

  template <class T, class Op>
  void all_reduce_staged(std::span<T> values, Op op) {
    static_assert(ReduceOp<Op, T>,
                  "lockstep: this reduce operation is not defined for these elements");
    const Call call = make_call<T>(CollectiveKind::all_reduce, values.size(), true, 0, Op::name);
    constexpr std::size_t most = shm::staging_bytes / sizeof(T);
    T* const staging = staging_source<T>()(me());
    std::vector<T*> targets(world());
    for (std::size_t w = 0; w < world(); ++w) targets[w] = staging_source<T>()(w);
    for (std::size_t begin = 0; begin < values.size(); begin += most) {
      const std::size_t n = std::min(most, values.size() - begin);
      copy<T>(values.data() + begin, staging, n);
      make_work(call, nothing<T>, true, [&](std::uint64_t) {
        push_slice<T>(op, targets, n);
      }).wait();
      copy<T>(staging, values.data() + begin, n);
    }
  }

  /// The general exchange: every rank offers `pieces` pieces of `count` elements, then reads what
  /// it needs of the others. `execute(source, stride, begin, n)`: elements [begin, begin + n) of
  /// piece p of rank w are at `source(w) + p * stride`.
  template <class T, class Execute>
  void exchange(const Call& call, std::span<const T> in, std::size_t pieces, std::size_t count,
                const Execute& execute) {
    if (is_small<T>(pieces * count)) {
      Call small = call;
      small.staged = false;
      make_work(small, in, false, [&](std::uint64_t ticket) {
        execute(small_source<T>(ticket), count, 0, count);
      }).wait();
      return;
    }
    if (!call.staged) {
      const std::uint64_t offset = engine_->locate(in.data(), in.size_bytes()).value_or(0);
      make_work(
          call, nothing<T>, true,
          [&](std::uint64_t ticket) { execute(arena_source<T>(ticket), count, 0, count); }, offset)
          .wait();
      return;
    }
    const std::size_t most = std::max<std::size_t>(1, shm::staging_bytes / sizeof(T) / pieces);
    T* const staging = staging_source<T>()(me());
    for (std::size_t begin = 0; begin < count; begin += most) {
      const std::size_t n = std::min(most, count - begin);
      for (std::size_t p = 0; p < pieces && !in.empty(); ++p)
        copy(in.data() + p * count + begin, staging + p * n, n);
      make_work(call, nothing<T>, true, [&](std::uint64_t) {
        execute(staging_source<T>(), n, begin, n);
      }).wait();
    }
  }

  template <class In, class Out>
  void gather_into(CollectiveKind kind, const In& in, Out&& out, Rank root, bool takes) {
    const auto piece = flat(in);
    const auto pieces = flat(out);
    using T = typename decltype(pieces)::element_type;
    const Call call = describe<T>(kind, piece, root);
    if (takes) check_size(call, pieces.size(), piece.size() * world());
    exchange(call, std::span<const T>(piece), 1, piece.size(),
             [&](const auto& source, std::size_t, std::size_t begin, std::size_t n) {
               for (std::size_t w = 0; takes && w < world(); ++w) {
                 copy(source(w), pieces.data() + w * piece.size() + begin, n);
               }
             });
  }

  static constexpr bool has_helper = std::same_as<Who, HelperThread>;

  std::unique_ptr<shm::Engine> engine_;
  std::unique_ptr<shm::Helper> helper_;  // ends before the engine does
};

static_assert(ArenaAllocating<ShmCommunicator<>> && AsyncReducing<ShmCommunicator<2>>);
static_assert(ReduceScattering<ShmCommunicator<>> && Scattering<ShmCommunicator<>> &&
              Messaging<ShmCommunicator<>>);
static_assert(AsyncReducing<ShmCommunicator<dynamic, HelperThread>>);

}  // namespace lockstep
