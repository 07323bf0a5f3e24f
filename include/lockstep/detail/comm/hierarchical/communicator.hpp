// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Hierarchical<...>>`'s communicator: one backend inside hosts, one between them.

#include "lockstep/detail/comm/call/watchdog.hpp"
#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/comm/hierarchical/hosts.hpp"
#include "lockstep/detail/topology/groups.hpp"

namespace lockstep::detail {

/// Memory that grows, and is freed only with its communicator: freeing waits as allocating does.
class Scratch {
 public:
  bool holds(std::size_t bytes) const { return allocated_.size() >= bytes; }

  /// Allocates `bytes`, at least 1.5 times the old size. **Ranks** as for `comm.allocate`.
  template <class Comm>
  void grow(Comm& comm, std::size_t bytes) {
    if (holds(bytes)) return;
    allocated_ = comm.template allocate<std::uint8_t>(std::max(bytes, allocated_.size() / 2 * 3));
  }

  template <class T>
  std::span<T> get(std::size_t count) const {
    return {reinterpret_cast<T*>(allocated_.data()), count};
  }

  template <class T>
  std::span<T> on_host(std::size_t count) {
    if (host_.size() < count * sizeof(T)) host_.resize(count * sizeof(T));
    return {reinterpret_cast<T*>(host_.data()), count};
  }

 private:
  std::span<std::uint8_t> allocated_;
  std::vector<std::byte> host_;
};

/// `Inside` joins the ranks of a host, `Between` those with one local rank on all hosts, `Flat`
/// all. Used by one thread at a time. Calls allocate no device memory. **Stream** as the three.
template <Communicator Inside, Communicator Between, class Flat = Between>
class HierarchyStages {
 public:
  /// Does the host pass on between hosts what GPUs have made inside of them? It waits for them, so
  /// that a fault there ends the call, and no other host takes what is left for data.
  static constexpr bool host_takes_part = !works_on_host<Inside> && std::same_as<Flat, Between>;

  HierarchyStages(Hosts hosts, Inside inside, Between between, Flat flat)
      : hosts_(std::move(hosts)),
        inside_(std::move(inside)),
        between_(std::move(between)),
        flat_(std::move(flat)) {
    allocate_foreseen();
  }
  /// `Flat` uses the other two. `name` is unique in the job.
  HierarchyStages(Hosts hosts, Inside inside, Between between, std::string name = "hierarchy")
    requires std::constructible_from<Flat, const Hosts&, Inside&, Between&>
      : name_(std::move(name)),
        hosts_(std::move(hosts)),
        inside_(std::move(inside)),
        between_(std::move(between)),
        flat_(hosts_, inside_, between_) {
    allocate_foreseen();
  }
  HierarchyStages(const HierarchyStages&) = delete;
  HierarchyStages& operator=(const HierarchyStages&) = delete;
  ~HierarchyStages() { queue_.drain(); }

  Inside& inside() { return inside_; }
  Between& between() { return between_; }
  Flat& flat() { return flat_; }
  TaskQueue& queue() { return queue_; }

  bool is_broken() const { return fault_.is_set(); }
  void raise_fault() const { fault_.raise(); }

  /// Aborts: every other rank's call fails with this reason. No call may be in flight.
  void abort(std::string_view reason) {
    inside_.abort(reason);  // at once; the others take longer if the store is lost
    give_up(reason);
  }
  /// Aborts while another thread may be in a call, which ends with the network's connections.
  void give_up(std::string_view reason = ended_by_exception) {
    fault_.note(gave_up("the hierarchy", reason, flat_.rank()));
    if constexpr (host_takes_part) inside_.abort(reason);
    flat_.abort(reason);
    between_.abort(reason);
  }

  /// Executes a call of all ranks, whose errors need no translation of rank numbers.
  template <class F>
  void through_flat(const F& make) {
    fault_.raise();
    try {
      make(flat_);
    } catch (const Error& error) {
      fail(error);
    }
  }

  /// In stages, or by `Flat` for few bytes (bound by latency) and for host memory of ranks on GPUs.
  template <class C>
  void make(const C& call) {
    using enum CollectiveKind;
    if constexpr (C::kind == all_reduce || C::kind == reduce_scatter || C::kind == all_gather) {
      bool is_large = C::kind == all_reduce ||
                      std::max(call.in.size_bytes(), call.out.size_bytes()) > few_bytes;
      if constexpr (requires { flat_.is_small(call); })
        is_large = is_large && !flat_.is_small(call);
      if (is_large && (call.count == 0 || passes_of(inside_).takes(call.in.data())))
        return by_stages(call);
    }
    through_flat([&](Flat& flat) { flat.perform(call); });
  }

  /// Reserves memory for calls of up to `bytes`, in the type of their sums: on GPUs they then run
  /// in one part and allocate nothing. Larger calls run in parts. **Ranks** all. **Host** blocks.
  void reserve(std::size_t bytes) {
    const std::size_t part = std::min(bytes, most_of_part);
    if (part <= foreseen_) return;
    foreseen_ = part;
    const Call call{CollectiveKind::allocate};
    stage(Part::inside, call, [&] { allocate_quietly(inside_, [&] { allocate_foreseen(); }); });
  }

  /// This rank's group, if any. **Ranks** all. **Host** blocks until the members have joined.
  std::unique_ptr<HierarchyStages> split(const GroupPosition& position) {
    constexpr bool one_joins_all = std::same_as<Flat, Between>;
    Hosts hosts = hosts_.of(position.members);
    // Every rank needs a partner on every host, and `TwoLevels` counts ranks host by host.
    if (!hosts.is_even() || (!one_joins_all && !hosts.is_in_order()))
      hosts = Hosts::one_each(position.members.size());
    GroupPosition local = position;  // among the members on this host
    if (position.is_member()) {
      local.rank = Rank{hosts.local_rank(position.rank)};
      local.members.clear();
      for (const std::size_t member : hosts.ranks(hosts.host(position.rank)))
        local.members.emplace_back(hosts_.local_rank(position.members[member]));
      local.group = local.leader().value();  // no two groups of a host have the same leader
    }
    std::unique_ptr<HierarchyStages> group;
    if constexpr (one_joins_all) {
      auto flat = flat_.template split<dynamic>(position);
      auto inside = inside_.template split<dynamic>(local);
      if (!flat || !inside) return nullptr;
      Between between =
          join_groups(*flat, Groups<World<dynamic>>(flat->world_size(), hosts.columns()));
      group = std::make_unique<HierarchyStages>(std::move(hosts), std::move(*inside),
                                                std::move(between), std::move(*flat));
    } else {
      flat_.agree(division_call(position));
      std::size_t turn = flat_.world_size().value();  // never, for those that are in no group
      allocate_quietly(inside_, [&] {
        auto inside = inside_.template split<dynamic>(local);
        std::string name = text({name_, "/", groups_++});
        if (!inside) return;
        name += text({".", position.leader()});
        // The number of the column's first rank: no other column has it, and all its ranks know it.
        turn = position.members[hosts.columns()[local.rank.value()].front()].value();
        Between between = between_.among(text({name, ", position ", local.rank}),
                                         Rank{hosts.host(position.rank)}, WorldSize{hosts.count()});
        group = std::make_unique<HierarchyStages>(std::move(hosts), std::move(*inside),
                                                  std::move(between), std::move(name));
      });
      if constexpr (requires { between_.warm_up(); })
        by_turns(inside_, turn, flat_.world_size().value(), [&] { group->between_.warm_up(); });
    }
    return group;
  }

 private:
  enum class Part { inside, between, flat };

  template <class T, class Op>
  void by_stages(const calls::AllReduce<T, Op>& call) {
    const Call described = agreed(call);
    const std::size_t most = most_elements<Prepared<T, Op>>();
    for (std::size_t begin = 0; begin < call.count; begin += most) {
      const std::size_t n = std::min(most, call.count - begin);
      reduce_part(described, call.on(call.in.subspan(begin, n), call.out.subspan(begin, n), n));
    }
  }

  /// Inside the host, each rank first reduces the pieces of all ranks with its local rank.
  template <class T, class Op>
  void by_stages(const calls::ReduceScatter<T, Op>& call) {
    using Value = Prepared<T, Op>;
    const Call described = agreed(call);
    const Combining<Op> combining(call.op);
    in_columns<Value>(call.count, [&](std::size_t begin, std::size_t n, std::size_t column) {
      const std::span<Value> piece = memory<Value>(described, pieces_, column);
      const std::span<Value> dealt = memory<Value>(described, whole_, column * local_world());
      for_each_local_rank([&](std::size_t rank, std::size_t position) {
        passes_of(inside_).prepare(call.in.subspan(rank * call.count + begin, n),
                                   dealt.subspan(position * n, n), call.op);
      });
      stage(Part::inside, described, [&] { inside_.reduce_scatter(dealt, piece, combining); });
      const std::span<Value> own = memory<Value>(described, finished_, n);
      stage(Part::between, described, [&] { between_.reduce_scatter(piece, own, combining); });
      passes_of(inside_).finish(std::span<const Value>(own), call.out.subspan(begin, n), call.op,
                                flat_.world_size().value());
    });
  }

  template <class T>
  void by_stages(const calls::AllGather<T>& call) {
    const Call described = agreed(call);
    in_columns<T>(call.count, [&](std::size_t begin, std::size_t n, std::size_t column) {
      const std::span<T> piece = memory<T>(described, pieces_, column);
      stage(Part::between, described,
            [&] { between_.all_gather(call.in.subspan(begin, n), piece); });
      const std::span<T> all = memory<T>(described, whole_, column * local_world());
      stage(Part::inside, described, [&] { inside_.all_gather(piece, all); });
      for_each_local_rank([&](std::size_t rank, std::size_t position) {
        passes_of(inside_).copy(std::span<const T>(all).subspan(position * n, n),
                                call.out.subspan(rank * call.count + begin, n));
      });
    });
  }

  /// Different calls can have equal pieces, so whole calls are compared first.
  template <class C>
  Call agreed(const C& call) {
    fault_.raise();
    const Call described = call.call();
    stage(Part::flat, described, [&] { flat_.agree(described); });
    return described;
  }

  /// Calls `f(begin, n, column)` for elements [begin, begin + n) of every rank's `count`, as many
  /// as memory holds. `column` is their number over all ranks with one local rank.
  template <class Value, class F>
  void in_columns(std::size_t count, const F& f) {
    const std::size_t world = flat_.world_size().value();
    const std::size_t most = std::max<std::size_t>(1, most_elements<Value>() / world);
    for (std::size_t begin = 0; begin < count; begin += most) {
      const std::size_t n = std::min(most, count - begin);
      f(begin, n, n * hosts_.count());
    }
  }
  /// Calls `f(rank, i)` for every rank, where i counts ranks by local rank, then by host.
  template <class F>
  void for_each_local_rank(const F& f) const {
    for (std::size_t host = 0; host != hosts_.count(); ++host) {
      const auto& ranks = hosts_.ranks(host);
      for (std::size_t position = 0; position != ranks.size(); ++position)
        f(ranks[position], position * hosts_.count() + host);
    }
  }

  /// Runs one stage of a call; an error aborts all stages on all ranks.
  template <class F>
  void stage(Part part, const Call& call, const F& f) {
    try {
      f();
      if constexpr (host_takes_part)
        if (part == Part::inside) inside_.synchronize();
    } catch (const Error& error) {
      const Rank me = flat_.rank();
      const std::string problem = text({error.operation(), ": ", error.problem()});
      fail(with_context(error, call.text(),
                        part == Part::inside    ? hosts_.text_inside(me, problem)
                        : part == Part::between ? hosts_.text_between(me, problem)
                                                : problem,
                        me));
    }
  }

  [[noreturn]] void fail(const Error& error) {
    fault_.note(error);
    abort(error.text());
    throw Error(error);
  }

  std::size_t local_world() const { return inside_.world_size().value(); }
  std::size_t piece_bytes(std::size_t part) const {
    return align_up(part / local_world() + sizeof(double));
  }

  /// Allocates device memory for the reserved size; host memory is allocated on demand.
  void allocate_foreseen() {
    if constexpr (!works_on_host<Inside>) {
      pieces_.grow(inside_, piece_bytes(foreseen_));
      finished_.grow(inside_, piece_bytes(foreseen_));
      whole_.grow(inside_, piece_bytes(foreseen_) * local_world());
    }
  }

  template <class Value>
  std::size_t most_elements() const {
    const std::size_t part = works_on_host<Inside> ? most_of_part : foreseen_;
    return piece_bytes(part) / sizeof(Value) * local_world();
  }

  /// Memory for `count` elements; on a host it is allocated at once for the reserved size.
  template <class T>
  std::span<T> memory(const Call& call, Scratch& scratch, std::size_t count) {
    if constexpr (works_on_host<Inside>) {
      const std::size_t foreseen =
          piece_bytes(foreseen_) * (&scratch == &whole_ ? local_world() : 1);
      stage(Part::inside, call,
            [&] { scratch.grow(inside_, std::max(count * sizeof(T), foreseen)); });
    }
    return scratch.template get<T>(count);
  }

  /// Data that needs no preparation and divides evenly is read, and written, in place. Results are
  /// finished where they were combined, unless that was in another type.
  template <class T, class Op>
  void reduce_part(const Call& described, const calls::AllReduce<T, Op>& part) {
    using Value = Prepared<T, Op>;
    constexpr bool is_prepared = std::same_as<T, Value> && !requires { part.op.factor; };
    const Combining<Op> combining(part.op);
    const std::size_t length = (part.count + local_world() - 1) / local_world();
    const std::size_t all = length * local_world();
    const bool divides = all == part.count;
    const std::span<Value> piece = memory<Value>(described, pieces_, length);
    std::span<const Value> values;
    if constexpr (is_prepared) values = part.in;
    if (!is_prepared || !divides) {
      const std::span<Value> prepared = memory<Value>(described, whole_, all);
      passes_of(inside_).prepare(part.in, prepared, part.op);
      values = prepared;
    }
    stage(Part::inside, described, [&] { inside_.reduce_scatter(values, piece, combining); });
    stage(Part::between, described, [&] { between_.all_reduce(piece, combining); });
    std::span<T> finished;
    if constexpr (std::same_as<T, Value>) {
      finished = piece;
    } else {
      finished = memory<T>(described, finished_, length);
    }
    if constexpr (!FinishedAsCombined<Op, T>)
      passes_of(inside_).finish(std::span<const Value>(piece), finished, part.op,
                                flat_.world_size().value());
    const std::span<T> gathered = divides ? part.out : memory<T>(described, whole_, all);
    stage(Part::inside, described, [&] { inside_.all_gather(finished, gathered); });
    if (!divides) passes_of(inside_).copy(std::span<const T>(gathered).first(part.count), part.out);
  }

  static constexpr std::size_t few_bytes = 64 << 10;
  /// Bounds the memory of a call: more data goes in parts of this many bytes.
  static constexpr std::size_t most_of_part = 32_MiB;
  /// Device memory for parts before the first `reserve`.
  static constexpr std::size_t first_part = 4_MiB;

  std::string name_;
  std::size_t groups_ = 0;  // that were made of this hierarchy
  Hosts hosts_;
  Inside inside_;
  Between between_;
  Flat flat_;
  std::size_t foreseen_ = works_on_host<Inside> ? 0 : first_part;
  Scratch pieces_;
  Scratch finished_;
  Scratch whole_;  // a part of the data, prepared, and later gathered
  FirstFault fault_;
  TaskQueue queue_{call_thread};
};

}  // namespace lockstep::detail

namespace lockstep {

/// An all-reduce has three stages: reduce-scatter inside each host, all-reduce of each piece
/// between hosts, all-gather inside each host. The data crosses the network once per host, not once
/// per rank, and all ranks carry an equal share. A large reduce-scatter uses the first two stages,
/// a large all-gather the last two, other collectives `Flat`. Results are bitwise equal on all
/// ranks. A failure in a stage aborts all ranks. **Host** and **Stream** as the communicators: with
/// host memory, every collective blocks until the result is here and the arguments may be reused.
template <Communicator Inside, Communicator Between, class Flat = Between>
class HierarchicalCommunicator
    : public Collectives<HierarchicalCommunicator<Inside, Between, Flat>> {
  using Stages = detail::HierarchyStages<Inside, Between, Flat>;

 public:
  static constexpr bool host_takes_part = Stages::host_takes_part;
  /// Calls in flight have no limit; this number is large enough for every job.
  static constexpr std::size_t most_in_flight = 256;

  explicit HierarchicalCommunicator(std::unique_ptr<Stages> stages) : stages_(std::move(stages)) {}

  Rank rank() const { return stages_->flat().rank(); }
  WorldSize world_size() const { return stages_->flat().world_size(); }
  std::chrono::milliseconds timeout() const { return stages_->flat().timeout(); }
  void set_timeout(std::chrono::milliseconds timeout) {
    stages_->inside().set_timeout(timeout + detail::inside_margin);
    stages_->between().set_timeout(timeout);
    stages_->flat().set_timeout(timeout);
  }

  /// `count` elements from `Inside`. **Ranks** all, with the same count.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    std::span<T> memory;
    detail::allocate_quietly(idle().inside(),
                             [&] { memory = stages_->inside().template allocate<T>(count); });
    return memory;
  }

  /// See `HierarchyStages::reserve`. **Ranks** all. **Host** blocks.
  void reserve(std::size_t bytes) { idle().reserve(bytes); }
  /// Waits for allocations on GPUs: see `allocate_quietly`. **Ranks** all. **Host** blocks.
  void finish_allocations() {
    if constexpr (!detail::works_on_host<Inside>) stages_->inside().barrier();
  }

  void abort(std::string_view reason) { idle().abort(reason); }
  void give_up() { stages_->give_up(); }
  bool is_broken() const { return stages_->is_broken(); }
  /// Throws the fault, if there is one: of a stage, or of the communicators between hosts.
  void raise_fault() {
    stages_->raise_fault();
    if constexpr (requires { stages_->between().raise_fault(); }) stages_->between().raise_fault();
  }

  // Called by `Collectives` and by adapters.

  Stages& stages() { return *stages_; }

  template <class C>
  void perform(const C& call) {
    if constexpr (C::is_message) {
      stages_->flat().perform(call);
    } else {
      idle().make(call);
    }
  }

  void agree(const detail::Call& call) {
    idle().through_flat([&](Flat& flat) { flat.agree(call); });
  }

  template <class C>
  auto start(const C& call) {
    stages_->raise_fault();
    const auto later = [stages = stages_.get(), call] { stages->make(call); };
    return Work<detail::PendingInQueue<Stages, decltype(later)>>(std::in_place, *stages_, later);
  }

  template <class T>
  void gather_pieces(std::span<const T> in, std::span<T> out, const GatheredPieces& pieces,
                     Rank root, bool on_device) {
    idle().through_flat([&](Flat& flat) { flat.gather_pieces(in, out, pieces, root, on_device); });
  }

  /// A hierarchy of the members' hosts, or the network alone if these have unequal numbers of them.
  template <std::size_t GroupRanks>
  std::optional<HierarchicalCommunicator> split(const detail::GroupPosition& position) {
    std::unique_ptr<Stages> group;
    idle().through_flat([&](Flat&) { group = stages_->split(position); });
    if (group == nullptr) return std::nullopt;
    return std::optional<HierarchicalCommunicator>(std::in_place, std::move(group));
  }

 private:
  Stages& idle() {
    stages_->queue().drain();
    return *stages_;
  }

  std::unique_ptr<Stages> stages_;
};

}  // namespace lockstep

namespace lockstep::detail {

/// Creates the communicator of a job whose hosts (the ranks discover them) have equally many ranks.
/// `make_network(member, store, name)` joins all ranks, `make_inside(member, store, name)` those of
/// a host; `name` distinguishes several of one job. **Ranks** all. **Host** blocks until all have
/// joined.
template <class MakeNetwork, class MakeInside>
auto make_hierarchy(const Membership& member, Store& store, const std::string& name,
                    const MakeNetwork& make_network, const MakeInside& make_inside) {
  using Network = decltype(make_network(member, store, name));
  using Inside = decltype(make_inside(member, store, name));
  const std::string known =
      "hierarchy/" + numbered_rendezvous(store, member.rank, "hierarchy", name);
  Hosts hosts = discover_hosts(member, store, "lockstep/" + known + "/");
  hosts.check_even(member.rank);
  Network flat = make_network(member, store, known);
  Network between = join_groups(flat, Groups<World<dynamic>>(member.world, hosts.columns()));

  const std::size_t host = hosts.host(member.rank);
  Membership local =
      in_group(member, Rank{hosts.local_rank(member.rank)}, WorldSize{hosts.ranks(host).size()});
  local.local_rank = local.rank.value();
  local.local_world = local.world.value();
  local.timeout += inside_margin;
  Inside inside = make_inside(local, store, known + "/" + std::to_string(host));

  using Both = HierarchyStages<Inside, Network>;
  return HierarchicalCommunicator<Inside, Network>(std::make_unique<Both>(
      std::move(hosts), std::move(inside), std::move(between), std::move(flat)));
}

}  // namespace lockstep::detail
