// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Collectives`, the base of communicators: all collectives, checked and described once.

#include "lockstep/detail/comm/communicator.hpp"
#include "lockstep/detail/comm/generic.hpp"

namespace lockstep {

/// Pieces of different lengths, one per rank, concatenated in rank order.
struct GatheredPieces {
  std::vector<std::size_t> counts;   // elements of each rank's piece
  std::vector<std::size_t> offsets;  // where each rank's piece begins

  std::size_t total() const { return counts.empty() ? 0 : offsets.back() + counts.back(); }
};

/// Pieces with their elements. `values` is empty on a rank that does not receive the elements.
template <class T>
struct Gathered : GatheredPieces {
  std::vector<T> values;

  /// The elements of a rank's piece.
  std::span<const T> of(Rank rank) const {
    return std::span<const T>(values).subspan(offsets[rank.value()], counts[rank.value()]);
  }
};

namespace detail {
GatheredPieces pieces_of(std::vector<std::size_t> counts);
}  // namespace detail

template <class Parent, std::size_t Ranks>
class Subgroup;

/// The CRTP base of every communicator, which has its collectives. Each checks its arguments and
/// passes them as a value (`Collective`) to `perform`. Arguments are spans, vectors, arrays or
/// dense views of one element type: a number, or bool, which is reduced with `Max` or `BitOr` (any
/// rank), `Min` or `BitAnd` (all ranks) or `BitXor`. For a number by value, the result is returned.
/// By default **Ranks** all, in the same order, **Host** and **Stream** as the communicator.
///
/// A backend derives from `Collectives<Backend>` and has `rank()`, `world_size()`, `timeout()`,
/// `set_timeout(limit)`, `abort(reason)` and `execute(call)` for `calls::Send` and
/// `calls::Receive`. Other collectives and groups have a generic form made of these (generic.hpp,
/// groups.hpp), which a faster `execute(call)` replaces. A backend that compares calls itself,
/// orders them on a stream or counts their time has its own `perform(call)` and moves elements by
/// `execute_any(*this, call)`. `abort(reason)` makes every other rank's call fail with this reason.
/// `give_up()` aborts because an exception has ended this rank's part, while another thread may be
/// in a call. After a failure (`is_broken()`) every later call fails.
template <class Self>
class Collectives {
  using JobCall = detail::JobCall;
  using Kind = detail::CollectiveKind;

 public:
  /// **Host** blocks until all ranks have arrived and their earlier calls are complete.
  void barrier(JobCall part_of = detail::current_job_call()) {
    self().perform(detail::calls::Barrier{{}, {}, 0, part_of});
  }

  /// A barrier with its own timeout, whose error lists every missing rank.
  void monitored_barrier(std::chrono::milliseconds limit) {
    const auto restore = [usual = self().timeout()](Self* self) { self->set_timeout(usual); };
    const std::unique_ptr<Self, decltype(restore)> restored(&self(), restore);
    self().set_timeout(limit);
    barrier();
  }

  /// data = op over ranks, on all ranks.
  template <class Data, class Op = Sum>
    requires(!detail::SingleElement<std::remove_cvref_t<Data>>)
  void all_reduce(Data&& data, Op op = {}, JobCall part_of = detail::current_job_call()) {
    require_operation<Data, Op>();
    self().perform(make_all_reduce(detail::elements_of(data), op, part_of));
  }
  /// One number: `const double mean = comm.all_reduce(loss, Average{});`
  template <detail::SingleElement T, class Op = Sum>
  [[nodiscard]] T all_reduce(T value, Op op = {}) {
    all_reduce(std::span<T>(&value, 1), op);
    return value;
  }

  /// Asynchronous all-reduce: see `Work`. **Host** returns at once if calls progress by themselves.
  template <class Data, class Op = Sum>
  auto all_reduce_async(Data&& data, Op op = {}, JobCall part_of = detail::current_job_call()) {
    require_operation<Data, Op>();
    return self().start(make_all_reduce(detail::elements_of(data), op, part_of));
  }

  /// On `root`, data = op over ranks; elsewhere data is unchanged.
  template <class Data, class Op = Sum>
    requires(!detail::SingleElement<std::remove_cvref_t<Data>>)
  void reduce(Data&& data, Rank root, Op op = {}) {
    require_operation<Data, Op>();
    require_root(Kind::reduce, root);
    const auto values = detail::elements_of(data);
    auto out = values;
    if (!is_root(root)) out = {};
    self().perform(
        make<Kind::reduce>(values, out, values.size(), detail::current_job_call(), root, op));
  }
  /// One number: the result on `root`, elsewhere the given number.
  template <detail::SingleElement T, class Op = Sum>
  [[nodiscard]] T reduce(T value, Rank root, Op op = {}) {
    reduce(std::span<T>(&value, 1), root, op);
    return value;
  }

  /// data = root's data.
  template <class Data>
    requires(!detail::SingleElement<std::remove_cvref_t<Data>>)
  void broadcast(Data&& data, Rank root, JobCall part_of = detail::current_job_call()) {
    require_root(Kind::broadcast, root);
    const auto values = detail::elements_of(data);
    const decltype(values) none{};
    self().perform(make<Kind::broadcast>(is_root(root) ? values : none,
                                         is_root(root) ? none : values, values.size(), part_of,
                                         root));
  }
  /// One number: root's.
  template <detail::SingleElement T>
  [[nodiscard]] T broadcast(T value, Rank root) {
    broadcast(std::span<T>(&value, 1), root);
    return value;
  }

  /// out = every rank's in, in rank order. `in` may be this rank's piece of `out`.
  template <class In, class Out>
  void all_gather(const In& in, Out&& out, JobCall part_of = detail::current_job_call()) {
    self().perform(make_all_gather(in, out, part_of));
  }
  /// The same, asynchronous: see `all_reduce_async`.
  template <class In, class Out>
  auto all_gather_async(const In& in, Out&& out, JobCall part_of = detail::current_job_call()) {
    return self().start(make_all_gather(in, out, part_of));
  }
  /// Every rank's number, by rank.
  template <detail::SingleElement T>
  [[nodiscard]] std::vector<T> all_gather(T value) {
    using Element = detail::ElementsOf<std::span<T>>;
    std::vector<Element> all(world());
    all_gather(detail::elements_of(std::span<const T>(&value, 1)), all);
    return std::vector<T>(all.begin(), all.end());
  }

  /// All-gathers inputs of different lengths, or empty ones, into new host memory (MPI_Allgatherv);
  /// bools become bytes. **Host** blocks until the counts are known.
  template <class In>
  auto all_gather_variable(const In& in) {
    return gather_new(detail::elements_of(in), std::nullopt);
  }
  /// The same into `out`, host or device memory, which must hold all elements.
  template <class In, class Out>
  GatheredPieces all_gather_variable(const In& in, Out&& out) {
    return gather_into<Common<In, Out>>(detail::elements_of(in), detail::elements_of(out),
                                        std::nullopt);
  }

  /// Like `all_gather_variable`, on `root` alone (MPI_Gatherv); other ranks get only the counts.
  template <class In>
  auto gather_variable(const In& in, Rank root) {
    require_root(Kind::gather_variable, root);
    return gather_new(detail::elements_of(in), root);
  }
  /// The same into root's `out`, host or device memory, which must hold all elements.
  template <class In, class Out>
  GatheredPieces gather_variable(const In& in, Out&& out, Rank root) {
    require_root(Kind::gather_variable, root);
    return gather_into<Common<In, Out>>(detail::elements_of(in), detail::elements_of(out), root);
  }

  /// On `root`, out = every rank's in; elsewhere out is not used.
  template <class In, class Out>
  void gather(const In& in, Out&& out, Rank root) {
    require_root(Kind::gather, root);
    const auto given = detail::elements_of(in);
    const std::span<Common<In, Out>> got = detail::elements_of(out);
    self().perform(make<Kind::gather>(given, is_root(root) ? got : decltype(got)(), given.size(),
                                      detail::current_job_call(), root));
  }

  /// out = this rank's piece of root's in. Elsewhere in is not used.
  template <class In, class Out>
  void scatter(const In& in, Out&& out, Rank root) {
    require_root(Kind::scatter, root);
    const std::span<const Common<In, Out>> given = detail::elements_of(in);
    const auto got = detail::elements_of(out);
    self().perform(make<Kind::scatter>(is_root(root) ? given : decltype(given)(), got, got.size(),
                                       detail::current_job_call(), root));
  }

  /// out = op over ranks of this rank's piece of in. `out` may be that piece; others are unchanged.
  template <class In, class Out, class Op = Sum>
  void reduce_scatter(const In& in, Out&& out, Op op = {}) {
    self().perform(make_reduce_scatter(in, out, op, detail::current_job_call()));
  }
  /// The same, asynchronous: see `all_reduce_async`.
  template <class In, class Out, class Op = Sum>
  auto reduce_scatter_async(const In& in, Out&& out, Op op = {},
                            JobCall part_of = detail::current_job_call()) {
    return self().start(make_reduce_scatter(in, out, op, part_of));
  }

  /// Piece w of out = piece `rank` of rank w's in. `in` and `out` must not overlap.
  template <class In, class Out>
  void all_to_all(const In& in, Out&& out) {
    const auto given = detail::elements_of(in);
    const std::span<Common<In, Out>> got = detail::elements_of(out);
    self().perform(
        make<Kind::all_to_all>(given, got, given.size() / world(), detail::current_job_call()));
  }

  /// Sends elements to one rank. **Ranks** this one; `to` calls `receive` with the same type and
  /// count. **Host** may block until then: two ranks that both send first may deadlock.
  template <class Data>
  void send(const Data& data, Rank to) {
    const auto values = detail::elements_of(data);
    require_peer("send", to);
    self().perform(
        detail::calls::send<std::remove_const_t<ElementOf<decltype(values)>>>(values, to));
  }

  /// Receives elements from one rank, which calls `send`. **Ranks** this one. **Host** as `send`.
  template <class Data>
  void receive(Data&& data, Rank from) {
    const auto values = detail::elements_of(data);
    require_peer("receive", from);
    self().perform(detail::calls::receive<ElementOf<decltype(values)>>(values, from));
  }

  // Members that a backend may replace by its own.

  /// Compares the call over ranks and executes it.
  template <class Call>
  void perform(const Call& call) {
    detail::compare_and_execute(self(), call);
  }

  /// Compares a call over ranks without executing it.
  void agree(const detail::Call& call) { detail::compare_gathered(self(), call); }

  /// Starts an asynchronous call; this form executes it at once.
  template <class Call>
  Work<detail::NothingPending> start(const Call& call) {
    self().perform(call);
    return Work<detail::NothingPending>(std::in_place);
  }

  /// Gathers pieces, whose lengths all ranks know, in root's `out`; this form sends messages.
  template <class T>
  void gather_pieces(std::span<const T> in, std::span<T> out, const GatheredPieces& pieces,
                     Rank root, [[maybe_unused]] bool on_device) {
    if (!is_root(root)) {
      if (!in.empty()) self().perform(detail::calls::send<T>(in, root));
      return;
    }
    for (std::size_t w = 0; w < world(); ++w) {
      const std::span<T> piece = out.subspan(pieces.offsets[w], pieces.counts[w]);
      if (piece.empty()) continue;
      if (Rank{w} == root) {
        detail::passes_of(self()).copy(in, piece);
      } else {
        self().perform(detail::calls::receive<T>(piece, Rank{w}));
      }
    }
  }

  /// The communicator of this rank's group, if it is in one; this form uses this one's messages.
  template <std::size_t GroupRanks>
  std::optional<Subgroup<Self, GroupRanks>> split(const detail::GroupPosition& position) {
    self().agree(detail::division_call(position));
    if (!position.is_member()) return std::nullopt;
    return std::optional<Subgroup<Self, GroupRanks>>(std::in_place, self(), position);
  }

 protected:
  Collectives() = default;

 private:
  template <class Span>
  using ElementOf = typename std::remove_cvref_t<Span>::element_type;

  template <class In, class Out>
  using Common = typename detail::CommonElement<In, Out>::type;

  Self& self() { return static_cast<Self&>(*this); }
  std::size_t world() { return self().world_size().value(); }
  bool is_root(Rank root) { return self().rank() == root; }

  /// Makes the call and checks its sizes. Only the root of a gather or scatter has every piece.
  template <Kind K, class T, class Op = detail::NoOperation>
  detail::Collective<K, T, Op> make(std::type_identity_t<std::span<const T>> in, std::span<T> out,
                                    std::size_t count, JobCall part_of, Rank root = Rank{0},
                                    const Op& op = {}) {
    using Call = detail::Collective<K, T, Op>;
    const Call call{in, out, count, part_of, root, op};
    const auto require_pieces = [&](std::size_t have) {
      if (have == count * world()) [[likely]]
        return;
      if (K == Kind::all_to_all && have == in.size()) {
        detail::fail(call.call().text(),
                     {have, " elements do not divide among ", world(), " ranks"},
                     "give a piece of the same size for every rank", self().rank());
      }
      detail::fail(call.call().text(),
                   {"sizes do not fit: ", have, " elements where ", count * world(), " are needed"},
                   "one argument holds a piece for every rank, the other one piece", self().rank());
    };
    const bool is_one_sided = K == Kind::gather || K == Kind::scatter;
    if (is_one_sided && !is_root(root)) return call;
    if constexpr (Call::deals_pieces) require_pieces(in.size());
    if constexpr (Call::collects_pieces) require_pieces(out.size());
    return call;
  }

  template <class T, class Op>
  auto make_all_reduce(std::span<T> values, const Op& op, JobCall part_of) {
    return make<Kind::all_reduce>(values, values, values.size(), part_of, Rank{0}, op);
  }

  template <class In, class Out>
  auto make_all_gather(const In& in, Out&& out, JobCall part_of) {
    const auto given = detail::elements_of(in);
    const std::span<Common<In, Out>> got = detail::elements_of(out);
    return make<Kind::all_gather>(given, got, given.size(), part_of);
  }

  template <class In, class Out, class Op>
  auto make_reduce_scatter(const In& in, Out&& out, const Op& op, JobCall part_of) {
    require_operation<Out, Op>();
    const std::span<Common<In, Out>> got = detail::elements_of(out);
    return make<Kind::reduce_scatter>(detail::elements_of(in), got, got.size(), part_of, Rank{0},
                                      op);
  }

  /// The description that ranks compare before they gather pieces, to `root` or to all.
  template <class T>
  static detail::Call variable_call(std::optional<Rank> root) {
    return {root ? Kind::gather_variable : Kind::all_gather_variable, detail::current_job_call(),
            element_kind<T>(), false, static_cast<std::uint16_t>(root.value_or(Rank{0}).value())};
  }

  /// Gathers into memory that is allocated once the counts are known.
  template <class T>
  auto gather_new(std::span<T> in, std::optional<Rank> root) {
    Gathered<std::remove_const_t<T>> gathered;
    if (detail::passes_of(self()).is_device(in.data())) {
      detail::fail(variable_call<std::remove_const_t<T>>(root).text(),
                   {"the elements are in device memory"},
                   "give it device memory for the result too", self().rank());
    }
    static_cast<GatheredPieces&>(gathered) =
        gather_variably<std::remove_const_t<T>>(in, root, any_room, false, [&](std::size_t total) {
          gathered.values.resize(total);
          return std::span(gathered.values);
        });
    return gathered;
  }

  template <class T>
  GatheredPieces gather_into(std::span<const T> in, std::span<T> out, std::optional<Rank> root) {
    const auto passes = detail::passes_of(self());
    const bool takes = !root || is_root(*root);
    const bool on_device = passes.is_device(in.data()) || (takes && passes.is_device(out.data()));
    return gather_variably<T>(in, root, takes ? out.size() : any_room, on_device,
                              [&](std::size_t total) { return out.first(total); });
  }

  static constexpr auto any_room = static_cast<std::uint64_t>(-1);

  /// Ranks first exchange how many elements they give and have room for, and whether a GPU has
  /// them: too little room on one rank is an error on all. `make_room(total)` returns the memory.
  template <class T, class MakeRoom>
  GatheredPieces gather_variably(std::span<const T> in, std::optional<Rank> root,
                                 std::uint64_t room, bool on_device, const MakeRoom& make_room) {
    const detail::Call call = variable_call<T>(root);
    self().agree(call);
    const std::uint64_t own[] = {in.size(), room, on_device ? 1u : 0u};
    constexpr std::size_t numbers = std::size(own);
    std::vector<std::uint64_t> gathered(numbers * world());
    all_gather(own, gathered);
    std::vector<std::size_t> counts(world());
    for (std::size_t w = 0; w < world(); ++w) counts[w] = gathered[numbers * w];
    GatheredPieces pieces = detail::pieces_of(std::move(counts));
    for (std::size_t w = 0; w < world(); ++w) {
      on_device = on_device || gathered[numbers * w + 2] != 0;
      if (gathered[numbers * w + 1] >= pieces.total()) continue;
      detail::fail(call.text(),
                   {"rank ", w, " has room for ", gathered[numbers * w + 1],
                    " elements, and all ranks bring ", pieces.total()},
                   "give it memory for all of them", self().rank());
    }
    const std::span<T> out = !root || is_root(*root) ? make_room(pieces.total()) : std::span<T>();
    if (world() == 1) {
      all_gather(in, out);
    } else if (root) {
      self().gather_pieces(in, out, pieces, *root, on_device);
    } else {
      for (std::size_t w = 0; w < world(); ++w) {
        const std::span<T> piece = out.subspan(pieces.offsets[w], pieces.counts[w]);
        if (piece.empty()) continue;
        if (is_root(Rank{w})) detail::passes_of(self()).copy(in, piece);
        broadcast(piece, Rank{w});
      }
    }
    return pieces;
  }

  template <class Data, class Op>
  static constexpr void require_operation() {
    if constexpr (detail::holds_elements<Data>()) {  // else `elements_of` says so
      constexpr bool logical = std::same_as<std::remove_const_t<detail::FlatElement<Data>>, bool>;
      static_assert(!logical || detail::is_logical<Op>,
                    "lockstep: bool is reduced with Max or BitOr (any rank), Min or BitAnd (all "
                    "ranks), or BitXor");
      static_assert(logical || ReduceOp<Op, detail::ElementsOf<Data>>,
                    "lockstep: this reduce operation is not defined for these elements");
    }
  }

  void require_root(detail::CollectiveKind kind, Rank root) {
    if (root.value() < world()) [[likely]]
      return;
    detail::fail(detail::collective_name(kind), {"root ", root, " is not in the world"},
                 detail::text({"give a rank below ", world()}), self().rank());
  }

  void require_peer(const char* operation, Rank peer) {
    if (peer.value() < world() && !is_root(peer)) [[likely]]
      return;
    detail::fail(operation, {"rank ", peer, " is not another rank of this world"},
                 detail::text({"give one below ", world()}), self().rank());
  }
};

}  // namespace lockstep
