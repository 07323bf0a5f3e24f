// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Shm>`'s communicator, with detection of missing ranks and mismatched calls.

#include "lockstep/detail/comm/backend.hpp"
#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/comm/shm/memory.hpp"
#include "lockstep/detail/launch/rendezvous.hpp"

namespace lockstep::detail::shm {

/// A call that is posted and not yet executed. Calls are executed in order: one counter is enough.
struct PostedCall {
  std::uint64_t ticket = 0;
  void (*finish)(PostedCall&) = nullptr;  // waits for all ranks, then executes the call
};

/// One rank's view of the shared control blocks. Used by one thread at a time.
class Engine : public SharedPeers {
 public:
  /// Creates the shared memory of a world. One rank does this and sends the others its `address`.
  static Descriptor make_file(WorldSize world);
  static std::string address(const Descriptor& file);
  static Descriptor open(const std::string& address);
  /// Opens the job's file, which rank 0 creates. **Ranks** all. **Host** blocks until it exists.
  static Descriptor join(const Membership& member, Store& store, const std::string& name);

  Engine(const GroupMember& member, Descriptor file, Milliseconds timeout);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  std::size_t me() const { return rank().value(); }
  RankBlock& block(std::size_t rank) const {
    return reinterpret_cast<RankBlock*>(blocks_.get())[rank];
  }
  Slot& slot(std::size_t rank, std::uint64_t ticket) const {
    return block(rank).slots[ticket % ring];
  }

  /// Allocates `bytes` for each rank, visible to all, or `common` to all. **Ranks** all, same size.
  std::byte* allocate(std::size_t bytes, bool common);

  /// The file offset of this rank's memory; nothing if it is not in one of its arenas.
  std::optional<std::uint64_t> locate(const void* data, std::size_t bytes) const {
    for (const Arena& arena : arenas_) {
      const std::byte* const begin = arena.memory.get() + me() * arena.stride;
      const auto* const first = static_cast<const std::byte*>(data);
      if (first >= begin && first + bytes <= begin + arena.stride) {
        return arena.offset + static_cast<std::uint64_t>(first - arena.memory.get());
      }
    }
    return std::nullopt;
  }
  /// The arena data that a rank has posted, as mapped in this process.
  std::byte* data_in_arena(std::size_t rank, std::uint64_t ticket) const {
    const std::uint64_t offset = slot(rank, ticket).offset;
    for (const Arena& arena : arenas_) {
      if (offset - arena.offset < arena.bytes) return arena.memory.get() + (offset - arena.offset);
    }
    return nullptr;
  }

  /// Posts a call whose data is ready: `small` is copied into the slot, other data is at `offset`.
  std::uint64_t post(const Call& call, std::uint64_t offset, std::span<const std::byte> small) {
    raise_fault();
    const std::uint64_t ticket = posted_++;
    if (ticket >= ring) {  // the slot's last call must be over on all ranks, this one first
      finish_pending(ticket - ring + 1);
      for_others([&](std::size_t w) { wait(w, block(w).finished, ticket - ring + 1, call); });
    }
    Slot& slot = this->slot(me(), ticket);
    slot.call = call;
    slot.offset = offset;
    records_[ticket % ring] = recorder().schedule(call);
    if (!small.empty()) std::memcpy(slot.data.data(), small.data(), small.size());
    publish(own().arrived, ticket + 1);
    return ticket;
  }

  void wait(std::size_t w, Counter& counter, std::uint64_t value, const Call& call) {
    if (reached(counter, value)) [[likely]]
      return;
    await(counter, value, call, Rank{w}, [&](const Error& error) { fail(error); });
  }

  bool all_arrived(std::uint64_t ticket) const {
    return all_others([&](std::size_t w) { return reached(block(w).state.arrived, ticket + 1); });
  }

  /// For polling: have all ranks posted the call, or done their work? Throws what a wait would.
  bool poll_arrived(std::uint64_t ticket) {
    return poll_all(ticket, [&](std::size_t w) -> Counter& { return block(w).state.arrived; });
  }
  bool poll_finished(std::uint64_t ticket) {
    return poll_all(ticket, [&](std::size_t w) -> Counter& { return block(w).finished; });
  }

  /// Waits until every rank has posted the call, and compares. No data is written before.
  void wait_arrived(std::uint64_t ticket) {
    for_others([&](std::size_t w) {
      wait(w, block(w).state.arrived, ticket + 1, slot(me(), ticket).call);
    });
    if (!all_agree(ticket)) [[unlikely]]
      fail_disagreement(ticket);
    recorder().start(records_[ticket % ring]);
  }
  void wait_finished(std::uint64_t ticket) {
    for_others(
        [&](std::size_t w) { wait(w, block(w).finished, ticket + 1, slot(me(), ticket).call); });
  }

  /// Publishes that this rank has executed its share of the call.
  void finish(std::uint64_t ticket) {
    worked_ = ticket + 1;
    recorder().complete(records_[ticket % ring]);
    publish(block(me()).finished, worked_);
  }

  // The calls from `worked_` up to `posted_` are pending on this rank.

  void add(PostedCall& call) { pending_[call.ticket % ring] = &call; }
  bool is_next(std::uint64_t ticket) const { return worked_ == ticket; }
  PostedCall& next() const { return *pending_[worked_ % ring]; }

  /// Executes every pending call that was posted before `ticket`.
  void finish_pending(std::uint64_t ticket) {
    while (worked_ < std::min(ticket, posted_)) {
      raise_fault();  // calls of a communicator that has failed are left as they are
      finish_next();
    }
  }

  /// The only indirect call, where the next call's type is unknown: out of order, or in the helper.
  [[gnu::noinline]] void finish_next() { next().finish(next()); }

  // The outbox holds one piece of a message, which must be received before the next is written.

  void send(const Call& call, std::span<const std::byte> bytes, Rank to);
  void receive(const Call& call, std::span<std::byte> bytes, Rank from);

  /// Starts a thread that executes calls once all have posted them; `wait` throws their errors.
  void start_helper();
  /// Locks the engine if a helper thread uses it too.
  template <bool Helped>
  std::unique_lock<std::mutex> turn() {
    if constexpr (Helped) return std::unique_lock(turns_);
    return {};
  }

 private:
  /// `file` is a reference: the delegating constructor maps the file in the same argument list.
  Engine(const GroupMember& member, std::shared_ptr<std::byte> blocks, Descriptor&& file,
         Milliseconds timeout);

  template <class CounterOf>
  bool poll_all(std::uint64_t ticket, const CounterOf& counter_of) {
    const bool all = all_others([&](std::size_t w) {
      if (reached(counter_of(w), ticket + 1)) return true;
      poll(counter_of(w), ticket + 1, slot(me(), ticket).call, Rank{w},
           [&](const Error& error) { fail(error); });
      return false;
    });
    if (all) end_poll();
    return all;
  }

  bool all_agree(std::uint64_t ticket) const {
    const Call& mine = slot(me(), ticket).call;
    return all_others([&](std::size_t w) { return slot(w, ticket).call == mine; });
  }
  [[noreturn, gnu::cold]] void fail_disagreement(std::uint64_t ticket);

  template <class F>
  bool all_others(const F& holds) const {
    for (std::size_t w = 0; w < world(); ++w) {
      if (w != me() && !holds(w)) return false;
    }
    return true;
  }
  template <class F>
  void for_others(const F& f) const {
    for (std::size_t i = 1; i < world(); ++i) f((me() + i) % world());
  }

  Descriptor file_;
  std::shared_ptr<std::byte> blocks_;
  std::size_t file_bytes_;
  std::vector<Arena> arenas_;
  std::uint64_t posted_ = 0;
  std::uint64_t worked_ = 0;
  std::array<PostedCall*, ring> pending_{};
  std::array<std::uint64_t, ring> records_{};  // of the flight recorder
  std::mutex turns_;                           // see `turn`
  std::atomic<bool> stopping_ = false;
  Thread helper_;
};

/// A posted call. `Execute` is this rank's share of the work, called once with the call's ticket
/// when all ranks have posted; its type is known, so that waiting in order is a direct call.
template <class Execute, bool Helped>
class Pending : PostedCall {
 public:
  /// **Ranks** all. **Host** blocks only while the call's slot is in use. `others_read`: this
  /// rank's memory is in use until all ranks have finished.
  Pending(Engine& engine, const Call& call, std::uint64_t offset, std::span<const std::byte> small,
          bool others_read, Execute execute)
      : engine_(engine), others_read_(others_read), execute_(execute) {
    const auto turn = engine.turn<Helped>();
    ticket = engine.post(call, offset, small);
    finish = [](PostedCall& posted) { static_cast<Pending&>(posted).finish_work(); };
    engine.add(*this);
  }
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;

  bool test() {
    const auto turn = engine_.turn<Helped>();
    engine_.raise_fault();
    if (!worked_) {
      while (!engine_.is_next(ticket)) {
        if (!engine_.poll_arrived(engine_.next().ticket)) return false;
        engine_.finish_next();
      }
      if (!engine_.poll_arrived(ticket)) return false;
      finish_work();
    }
    done_ = done_ || !others_read_ || engine_.poll_finished(ticket);
    return done_;
  }

  void wait() {
    const auto turn = engine_.turn<Helped>();
    if (done_) return;
    engine_.raise_fault();
    if (!worked_) {
      engine_.finish_pending(ticket);
      finish_work();
    }
    if (done_) return;
    done_ = true;
    engine_.wait_finished(ticket);
  }

  /// Aborts the communicator, because the caller may free the call's memory now.
  void leave() {
    const auto turn = engine_.turn<Helped>();
    if (!done_) engine_.abort(ended_by_exception);
  }

 private:
  void finish_work() {
    worked_ = done_ = true;  // set first: a call that fails is over
    engine_.wait_arrived(ticket);
    execute_(ticket);
    engine_.finish(ticket);
    done_ = !others_read_;
  }

  Engine& engine_;
  bool others_read_;
  Execute execute_;
  bool worked_ = false;
  bool done_ = false;
};

}  // namespace lockstep::detail::shm

namespace lockstep {

/// Collectives through shared memory, for processes of one host or threads of one process. A static
/// world size, `Ranks`, unrolls reductions. Results are bitwise equal on all ranks and in every
/// run: values are combined in rank order. Calls are compared before anything is written. Memory
/// from `allocate` is reduced in place; other memory above 4 KiB is staged before a call returns.
///
/// **Host** every collective blocks until the result is here and the arguments may be reused; a
/// message of up to 64 KiB may be buffered. **Stream** none: host memory only.
template <std::size_t Ranks = dynamic, class Who = Callers>
class ShmCommunicator : public Collectives<ShmCommunicator<Ranks, Who>> {
  using Engine = detail::shm::Engine;
  using Kind = detail::CollectiveKind;

 public:
  /// A call beyond this number in flight waits for the oldest.
  static constexpr std::size_t most_in_flight = detail::shm::ring;

  /// Joins a world through the file that one rank created (`Engine::make_file`) and all have
  /// opened. **Ranks** all. **Host** blocks until all have joined.
  ShmCommunicator(const detail::GroupMember& member, detail::Descriptor file,
                  std::chrono::milliseconds timeout)
      : engine_(std::make_unique<Engine>(member, std::move(file), timeout)) {
    detail::require_world<Ranks>(member.world, member.rank);
    this->barrier();
    if constexpr (has_helper) engine_->start_helper();
  }

  /// The same for the ranks of a job of its own.
  ShmCommunicator(Rank rank, WorldSize world, detail::Descriptor file,
                  std::chrono::milliseconds timeout)
      : ShmCommunicator(detail::GroupMember{"world", rank, world, rank}, std::move(file), timeout) {
  }
  ShmCommunicator(ShmCommunicator&&) noexcept = default;
  ShmCommunicator& operator=(ShmCommunicator&&) = delete;

  Rank rank() const { return engine_->rank(); }
  WorldSize world_size() const { return WorldSize{world(*engine_)}; }
  std::chrono::milliseconds timeout() const { return engine_->timeout(); }
  void set_timeout(std::chrono::milliseconds timeout) { engine_->set_timeout(timeout); }

  /// Zeroed elements that all ranks can access, for its lifetime. **Ranks** all, with one count.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    const auto turn = this->turn();
    return {reinterpret_cast<T*>(engine_->allocate(count * sizeof(T), false)), count};
  }

  /// `count` zeroed elements that all ranks share. **Ranks** all, with the same count.
  template <Element T>
  std::span<T> allocate_shared(std::size_t count) {
    const auto turn = this->turn();
    return {reinterpret_cast<T*>(engine_->allocate(count * sizeof(T), true)), count};
  }

  void abort(std::string_view reason) {
    const auto turn = this->turn();
    engine_->abort(reason);
  }

  /// The range [begin, end) of `count` elements that this rank combines in `reduce_slice`.
  template <Element T>
  std::pair<std::size_t, std::size_t> slice(std::size_t count) const {
    return detail::slice_of<T>(count, engine_->me(), world(*engine_));
  }

  /// Reduces this rank's slice of `data`, which must be in memory from `allocate`, and passes the
  /// results to `consume(begin, results)` or `consume(begin, results, all_ranks_data)`, while they
  /// are cached. `data` is unchanged. **Ranks** all. **Host** blocks until all have consumed.
  template <class Data, class Op, class Consume>
  void reduce_slice(Data&& data, Op op, const Consume& consume,
                    detail::JobCall part_of = detail::current_job_call()) {
    const auto values = flat(data);
    using T = detail::FlatElement<Data>;
    static_assert(ReduceOp<Op, T>,
                  "lockstep: this reduce operation is not defined for these elements");
    detail::Call call =
        detail::calls::ReduceScatter<T, Op>{values, {}, values.size(), part_of, Rank{0}, op}.call();
    const auto offset = engine_->locate(values.data(), values.size_bytes());
    if (!offset) {
      throw Error(call.text(), "the data is not in memory from allocate",
                  "reduce slices of arenas only", rank());
    }
    post(call, {}, *offset, true, [&](std::uint64_t ticket) {
      const auto [begin, end] = slice<T>(values.size());
      const auto all = data_of_all<T>(*engine_, in_arenas<T>(*engine_, ticket));
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

  // Called by `Collectives`.

  template <class C>
  void perform(const C& call);

  /// Memory outside of arenas is reduced at once, and the handle is that of an empty call.
  template <class C>
  auto start(const C& call) {
    const auto moving = as_moved(call);
    const auto offset = location(moving);
    if (!offset) make_staged(moving, call.call());
    return begin(offset ? moving : moving.on({}, {}, 0),
                 offset ? call.call() : call.on({}, {}, 0).call(), offset.value_or(0));
  }

  void agree(const detail::Call& call) {
    post(call, {}, 0, false, [](std::uint64_t) {}).wait();
  }

  template <std::size_t GroupRanks>
  std::optional<ShmCommunicator<GroupRanks>> split(const detail::GroupPosition& position) {
    agree(detail::division_call(position));
    const std::string name = engine_->next_group_name(position.group);
    detail::Descriptor file;
    std::string address;
    if (position.is_member() && position.rank == Rank{0}) {
      file = Engine::make_file(position.world());
      address = Engine::address(file);
    }
    const std::vector<std::string> addresses = all_gather_objects(*this, address);
    std::optional<ShmCommunicator<GroupRanks>> group;
    if (position.is_member()) {
      if (position.rank != Rank{0}) file = Engine::open(addresses[position.leader().value()]);
      const Rank job_rank = engine_->recorder().member().job_rank;
      group.emplace(detail::GroupMember{name, position.rank, position.world(), job_rank},
                    std::move(file), timeout());
    }
    this->barrier();  // the leader's file stays open until all have opened it
    return group;
  }

 private:
  static constexpr bool has_helper = std::same_as<Who, HelperThread>;
  auto turn() { return engine_->template turn<has_helper>(); }

  static std::size_t world(const Engine& engine) {
    return Ranks == dynamic ? engine.world() : Ranks;
  }

  /// A call that combines nothing moves bytes: all element types share its code. Their call is
  /// described before.
  template <class C>
  static auto as_moved(const C& call) {
    using T = typename C::element;
    if constexpr (std::is_same_v<typename C::operation, detail::NoOperation>) {
      return detail::Collective<C::kind, std::uint8_t>{
          {reinterpret_cast<const std::uint8_t*>(call.in.data()), call.in.size_bytes()},
          {reinterpret_cast<std::uint8_t*>(call.out.data()), call.out.size_bytes()},
          call.count * sizeof(T),
          call.part_of,
          call.root};
    } else {
      return call;
    }
  }

  template <class T>
  static constexpr bool is_small(std::size_t count) {
    return count * sizeof(T) <= detail::shm::small_bytes;
  }

  /// The number of pieces in a rank's input.
  template <class C>
  std::size_t pieces() const {
    return C::deals_pieces ? world(*engine_) : 1;
  }

  /// The offset at which other ranks find the data: 0 for small data, which is copied into the
  /// slot, and nothing for memory outside of arenas. All ranks must choose alike, and only the root
  /// of a scatter knows where its memory is: a scatter of more than small data is always staged.
  template <class C>
  std::optional<std::uint64_t> location(const C& call) const {
    using T = typename C::element;
    if constexpr (C::kind == Kind::scatter) {
      if (!is_small<T>(pieces<C>() * call.count)) return std::nullopt;
    }
    std::span<const T> data = call.in;
    if constexpr (C::is_in_place) data = call.data();
    if (is_small<T>(data.size())) return 0;
    return engine_->locate(data.data(), data.size_bytes());
  }

  /// Executes a call of moved bytes or of elements to combine, which ranks know as `described`.
  template <class C>
  void perform_as(const C& call, const detail::Call& described);

  /// Posts a call; the arguments are those of `Engine::post` and `Pending`.
  template <class Execute>
  auto post(const detail::Call& call, std::span<const std::byte> small, std::uint64_t offset,
            bool others_read, const Execute& execute) {
    return Work<detail::shm::Pending<Execute, has_helper>>(std::in_place, *engine_, call, offset,
                                                           small, others_read, execute);
  }

  // `source(w)` is where rank w's data of a call is: in its arena, its staging area or its slot.

  template <class T>
  static auto in_arenas(const Engine& engine, std::uint64_t ticket) {
    return [&engine, ticket](std::size_t w) {
      return reinterpret_cast<T*>(engine.data_in_arena(w, ticket));
    };
  }
  template <class T, class Source>
  static std::vector<T*> data_of_all(const Engine& engine, const Source& source) {
    std::vector<T*> data(world(engine));
    for (std::size_t w = 0; w < data.size(); ++w) data[w] = source(w);
    return data;
  }

  template <class C>
  static constexpr bool pushes = C::kind == Kind::all_reduce;

  /// Executes this rank's share of elements [begin, begin + n) of every piece; those of rank w's
  /// piece p are at `source(w) + p * stride`. In an all-reduce each rank reduces its slice in
  /// registers and stores it to all ranks; in other calls it reads what it needs from the others.
  template <class C, class Source>
  static void work(const Engine& engine, const C& call, const Source& source, std::size_t stride,
                   std::size_t begin, std::size_t n) {
    using T = typename C::element;
    if constexpr (pushes<C>) {
      const auto [first, end] = detail::slice_of<T>(n, engine.me(), world(engine));
      detail::push<Ranks, T>(data_of_all<T>(engine, source), first, end, call.op);
    } else {
      detail::take_from_all<Ranks>(call, engine.rank(), world(engine), source, stride, begin, n);
    }
  }

  /// Starts a call whose data is small (then every rank combines it) or in an arena, at `offset`.
  template <class C>
  auto begin(const C& call, const detail::Call& described, std::uint64_t offset) {
    using T = typename C::element;
    const bool small = is_small<T>(pieces<C>() * call.count);
    const auto execute = [engine = engine_.get(), call, small](std::uint64_t ticket) {
      if (small) {
        const auto in_slots = [&](std::size_t w) {
          return reinterpret_cast<T*>(engine->slot(w, ticket).data.data());
        };
        detail::take_from_all<Ranks>(call, engine->rank(), world(*engine), in_slots, call.count, 0,
                                     call.count);
      } else {
        work(*engine, call, in_arenas<T>(*engine, ticket), call.count, 0, call.count);
      }
    };
    return post(described, small ? std::as_bytes(call.in) : std::span<const std::byte>(), offset,
                !small, execute);
  }

  /// Executes a call on private memory, as much at a time as the staging area holds.
  template <class C>
  void make_staged(const C& call, detail::Call described) {
    using T = typename C::element;
    const auto in_staging = [engine = engine_.get()](std::size_t w) {
      return reinterpret_cast<T*>(engine->block(w).staging.data());
    };
    described.staged = true;
    const std::size_t rows = pieces<C>();
    const std::size_t most =
        std::max<std::size_t>(1, detail::shm::staging_bytes / sizeof(T) / rows);
    T* const staging = in_staging(engine_->me());
    for (std::size_t begin = 0; begin < call.count; begin += most) {
      const std::size_t n = std::min(most, call.count - begin);
      for (std::size_t p = 0; p < rows && !call.in.empty(); ++p)
        detail::copy_elements(call.in.data() + p * call.count + begin, staging + p * n, n);
      post(described, {}, 0, true, [&](std::uint64_t) {
        work(*engine_, call, in_staging, n, begin, n);
      }).wait();
      if constexpr (pushes<C>) detail::copy_elements(staging, call.out.data() + begin, n);
    }
  }

  std::unique_ptr<Engine> engine_;
};

// Not in the class, where it would be inline, and compiled in spite of `extern template`.
template <std::size_t Ranks, class Who>
template <class C>
void ShmCommunicator<Ranks, Who>::perform(const C& call) {
  if constexpr (C::kind == Kind::send) {
    const auto turn = this->turn();
    engine_->send(call.call(), std::as_bytes(call.in), call.root);
  } else if constexpr (C::kind == Kind::receive) {
    const auto turn = this->turn();
    engine_->receive(call.call(), std::as_writable_bytes(call.out), call.root);
  } else if constexpr (C::kind == Kind::barrier) {
    agree(call.call());
  } else {
    perform_as(as_moved(call), call.call());
  }
}

template <std::size_t Ranks, class Who>
template <class C>
void ShmCommunicator<Ranks, Who>::perform_as(const C& call, const detail::Call& described) {
  if (const auto offset = location(call)) {
    begin(call, described, *offset).wait();
  } else {
    make_staged(call, described);
  }
}

#if defined(LOCKSTEP_COMPILED)
// What jobs of a world that is known at run time need is in the compiled library (`comm.ipp`).
namespace detail {
using DynamicShm = ShmCommunicator<>;
}  // namespace detail
extern template void detail::DynamicShm::perform_as(const detail::calls::Broadcast<std::uint8_t>&,
                                                    const detail::Call&);
extern template void detail::DynamicShm::perform_as(const detail::calls::AllGather<std::uint8_t>&,
                                                    const detail::Call&);
extern template void detail::DynamicShm::perform_as(const detail::calls::AllReduce<float, Average>&,
                                                    const detail::Call&);
extern template void detail::DynamicShm::perform_as(const detail::calls::AllReduce<float, Sum>&,
                                                    const detail::Call&);
extern template void detail::DynamicShm::perform_as(const detail::calls::AllReduce<double, Sum>&,
                                                    const detail::Call&);
#endif

/// Creates a job's communicator `name`. **Ranks** all. **Host** blocks until all have joined.
template <std::size_t Ranks = dynamic, class Who = Callers>
ShmCommunicator<Ranks, Who> make_shm_communicator(const Membership& member, Store& store,
                                                  const std::string& name = "world") {
  detail::require_world<Ranks>(member.world, member.rank);  // before the others wait for a file
  return {detail::group_member(member, name), detail::shm::Engine::join(member, store, name),
          member.timeout};
}

}  // namespace lockstep
