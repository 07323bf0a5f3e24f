// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The front of every communicator: all collectives, checked and described once.

#include <concepts>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/combine.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/generic.hpp"
#include "lockstep/comm/variable_gather.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/view.hpp"

namespace lockstep {

template <class Parent, std::size_t Ranks>
class Subgroup;

/// The base of every communicator, which has its collectives. Each turns its arguments into a value
/// (see `Collective`), refuses arguments that cannot be right, and hands the value to `perform`.
/// Arguments are spans, vectors, arrays or views without gaps, of one element type: a number, or
/// bool, which is reduced with `Max` or `BitOr` (any rank), `Min` or `BitAnd` (all ranks) or
/// `BitXor`. A single number may be given as it is; the result is then returned.
///
/// A backend derives from `Collectives<Backend>` and has `rank()`, `world_size()`, `timeout()`,
/// `set_timeout(limit)`, `abandon(reason)` and `execute(call)` for two calls: `calls::Send` and
/// `calls::Receive`. All other collectives, and groups, have a generic form made of these
/// (generic.hpp, subgroup.hpp). A backend has `execute(call)` for more calls where it knows a
/// faster way. A backend that compares calls by itself, orders them on a stream or counts their
/// time has `perform(call)` of its own, and leaves the moving of elements to `execute_any(*this,
/// call)`. An adapter passes `perform` on.
///
/// Every collective, unless it says otherwise: **Ranks** all of them, in the same order. **Host**
/// and **Stream** as the communicator says.
template <class Self>
class Collectives {
 public:
  /// **Host** blocks until all ranks have come and their earlier calls are done.
  void barrier(detail::JobCall part_of = detail::current_job_call()) {
    self().perform(detail::calls::Barrier{{}, {}, 0, Rank{0}, {}, part_of});
  }

  /// A barrier with a time limit of its own, whose error lists every rank that is missing.
  void monitored_barrier(std::chrono::milliseconds limit) {
    struct Usual {
      Self& self;
      std::chrono::milliseconds limit = self.timeout();
      ~Usual() { self.set_timeout(limit); }
    };
    const Usual usual{self()};
    self().set_timeout(limit);
    barrier();
  }

  /// data = op over ranks, on all ranks.
  template <class Data, class Op = Sum>
    requires(!detail::SingleElement<std::remove_cvref_t<Data>>)
  void all_reduce(Data&& data, Op op = {}, detail::JobCall part_of = detail::current_job_call()) {
    require_operation<Data, Op>();
    self().perform(make_all_reduce(detail::elements_of(data), op, part_of));
  }
  /// One number: `const double mean = comm.all_reduce(loss, Average{});`
  template <detail::SingleElement T, class Op = Sum>
  [[nodiscard]] T all_reduce(T value, Op op = {}) {
    all_reduce(std::span<T>(&value, 1), op);
    return value;
  }

  /// An asynchronous all-reduce; the handle is a `Work`. The data belongs to the call until it is
  /// over. **Host** returns at once where the backend can go on by itself.
  template <class Data, class Op = Sum>
  auto all_reduce_async(Data&& data, Op op = {},
                        detail::JobCall part_of = detail::current_job_call()) {
    require_operation<Data, Op>();
    return self().start(make_all_reduce(detail::elements_of(data), op, part_of));
  }

  /// On `root`, data = op over ranks; elsewhere it keeps what it was.
  template <class Data, class Op = Sum>
    requires(!detail::SingleElement<std::remove_cvref_t<Data>>)
  void reduce(Data&& data, Rank root, Op op = {}) {
    require_operation<Data, Op>();
    const auto values = detail::elements_of(data);
    using T = Writable<decltype(values)>;
    require_root(detail::CollectiveKind::reduce, root);
    self().perform(detail::calls::Reduce<T, Op>{values, is_root(root) ? values : std::span<T>(),
                                                values.size(), root, op,
                                                detail::current_job_call()});
  }

  /// One number: the result on `root`, elsewhere what was given.
  template <detail::SingleElement T, class Op = Sum>
  [[nodiscard]] T reduce(T value, Rank root, Op op = {}) {
    reduce(std::span<T>(&value, 1), root, op);
    return value;
  }

  /// data = root's data.
  template <class Data>
    requires(!detail::SingleElement<std::remove_cvref_t<Data>>)
  void broadcast(Data&& data, Rank root, detail::JobCall part_of = detail::current_job_call()) {
    const auto values = detail::elements_of(data);
    using T = Writable<decltype(values)>;
    require_root(detail::CollectiveKind::broadcast, root);
    self().perform(detail::calls::Broadcast<T>{is_root(root) ? values : std::span<T>(),
                                               is_root(root) ? std::span<T>() : values,
                                               values.size(),
                                               root,
                                               {},
                                               part_of});
  }
  /// Root's number.
  template <detail::SingleElement T>
  [[nodiscard]] T broadcast(T value, Rank root) {
    broadcast(std::span<T>(&value, 1), root);
    return value;
  }

  /// out = every rank's in, one behind the other. In may be this rank's piece of out.
  template <class In, class Out>
  void all_gather(const In& in, Out&& out, detail::JobCall part_of = detail::current_job_call()) {
    self().perform(make_all_gather(in, out, part_of));
  }
  /// The same as an asynchronous call, whose handle is a `Work`. The data belongs to the call until
  /// it is over. **Host** returns at once where the backend can go on by itself.
  template <class In, class Out>
  auto all_gather_async(const In& in, Out&& out,
                        detail::JobCall part_of = detail::current_job_call()) {
    return self().start(make_all_gather(in, out, part_of));
  }
  /// Every rank's number, by rank.
  template <detail::SingleElement T>
  [[nodiscard]] std::vector<T> all_gather(T value) {
    using Travelling = detail::ElementsOf<std::span<T>>;
    std::vector<Travelling> all(world());
    all_gather(detail::elements_of(std::span<const T>(&value, 1)), all);
    return std::vector<T>(all.begin(), all.end());
  }

  /// Every rank's in, one behind the other, where each rank brings as many elements as it has, or
  /// none: host memory. Bools come as bytes. **Host** blocks until the counts are here.
  template <class In>
  auto all_gather_variable(const In& in) {
    using T = std::remove_const_t<detail::ElementsOf<const In>>;
    return detail::VariableGather<Self, T>(self()).into_new(detail::elements_of(in));
  }
  /// The same into given memory, the host's or a GPU's, which must hold all elements.
  template <class In, class Out>
  GatheredPieces all_gather_variable(const In& in, Out&& out) {
    using T = Common<In, Out>;
    return detail::VariableGather<Self, T>(self()).into(detail::elements_of(in),
                                                        detail::elements_of(out));
  }

  /// On `root`, every rank's in, where each rank brings as many elements as it has, or none: host
  /// memory. The other ranks get the counts alone. **Host** blocks until the counts are here.
  template <class In>
  auto gather_variable(const In& in, Rank root) {
    using T = std::remove_const_t<detail::ElementsOf<const In>>;
    require_root(detail::CollectiveKind::gather_variable, root);
    return detail::VariableGather<Self, T>(self(), root).into_new(detail::elements_of(in));
  }
  /// The same into memory of root's, the host's or a GPU's, which must hold all elements. Elsewhere
  /// out is not used.
  template <class In, class Out>
  GatheredPieces gather_variable(const In& in, Out&& out, Rank root) {
    using T = Common<In, Out>;
    require_root(detail::CollectiveKind::gather_variable, root);
    return detail::VariableGather<Self, T>(self(), root)
        .into(detail::elements_of(in), detail::elements_of(out));
  }

  /// On `root`, out = every rank's in; elsewhere out is not used.
  template <class In, class Out>
  void gather(const In& in, Out&& out, Rank root) {
    require_root(detail::CollectiveKind::gather, root);
    const auto given = detail::elements_of(in);
    detail::calls::Gather<Common<In, Out>> call{
        given, detail::elements_of(out), given.size(), root, {}, detail::current_job_call()};
    if (!is_root(root)) call.out = {};
    if (is_root(root)) require_size(call, call.out.size(), call.count * world());
    self().perform(call);
  }

  /// out = this rank's piece of root's in. Elsewhere in is not used.
  template <class In, class Out>
  void scatter(const In& in, Out&& out, Rank root) {
    require_root(detail::CollectiveKind::scatter, root);
    const auto got = detail::elements_of(out);
    detail::calls::Scatter<Common<In, Out>> call{
        detail::elements_of(in), got, got.size(), root, {}, detail::current_job_call()};
    if (!is_root(root)) call.in = {};
    if (is_root(root)) require_size(call, call.in.size(), call.count * world());
    self().perform(call);
  }

  /// out = op over ranks of this rank's piece of in. Out may be that piece of in; the others are
  /// not changed.
  template <class In, class Out, class Op = Sum>
  void reduce_scatter(const In& in, Out&& out, Op op = {}) {
    self().perform(make_reduce_scatter(in, out, op, detail::current_job_call()));
  }
  /// The same as an asynchronous call: see `all_gather_async`.
  template <class In, class Out, class Op = Sum>
  auto reduce_scatter_async(const In& in, Out&& out, Op op = {},
                            detail::JobCall part_of = detail::current_job_call()) {
    return self().start(make_reduce_scatter(in, out, op, part_of));
  }

  /// Piece w of out = piece `rank` of rank w's in. The two must not overlap.
  template <class In, class Out>
  void all_to_all(const In& in, Out&& out) {
    const auto given = detail::elements_of(in);
    const detail::calls::AllToAll<Common<In, Out>> call{
        given, detail::elements_of(out),  given.size() / world(), Rank{0},
        {},    detail::current_job_call()};
    if (call.count * world() != call.in.size()) {
      throw Error(call.call().text(),
                  std::to_string(call.in.size()) + " elements do not divide among " +
                      std::to_string(world()) + " ranks",
                  "give a piece of the same size for every rank", self().rank());
    }
    require_size(call, call.out.size(), call.in.size());
    self().perform(call);
  }

  /// Sends elements to one rank. **Ranks** this one, and `to` calls `receive` with the same type
  /// and count. **Host** may block until it has: two ranks that both send first may wait for each
  /// other.
  template <class Data>
  void send(const Data& data, Rank to) {
    const auto values = detail::elements_of(data);
    using T = std::remove_const_t<typename decltype(values)::element_type>;
    require_peer("send", to);
    self().perform(detail::calls::send<T>(values, to));
  }

  /// Receives elements from one rank, which calls `send`. **Ranks** this one. **Host** as `send`.
  template <class Data>
  void receive(Data&& data, Rank from) {
    const auto values = detail::elements_of(data);
    require_peer("receive", from);
    self().perform(detail::calls::receive<Writable<decltype(values)>>(values, from));
  }

  // Members that a backend may replace by its own.

  /// Compares the call over ranks and executes it.
  template <class Call>
  void perform(const Call& call) {
    detail::compare_and_execute(self(), call);
  }

  /// Compares a call over ranks that something else makes.
  void agree(const detail::Call& call) { detail::compare_gathered(self(), call); }

  /// Starts an asynchronous call; this form makes it at once.
  template <class Call>
  Work<detail::NothingPending> start(const Call& call) {
    self().perform(call);
    return Work<detail::NothingPending>(std::in_place);
  }

  /// Moves pieces of different lengths to `root`, whose out they fill; all ranks know the lengths.
  /// This form sends messages.
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

  /// The communicator of this rank's group, if it is in one. It uses this communicator's messages.
  template <std::size_t GroupRanks>
  std::optional<Subgroup<Self, GroupRanks>> split(const detail::GroupPlace& place) {
    self().agree(detail::division_call(place));
    if (!place.is_member()) return std::nullopt;
    return std::optional<Subgroup<Self, GroupRanks>>(std::in_place, self(), place);
  }

 protected:
  Collectives() = default;

 private:
  template <class Span>
  using Writable = typename std::remove_cvref_t<Span>::element_type;

  template <class In, class Out>
  using Common = typename detail::CommonElement<In, Out>::type;

  Self& self() { return static_cast<Self&>(*this); }
  std::size_t world() { return self().world_size().value(); }
  bool is_root(Rank root) { return self().rank() == root; }

  template <class T, class Op>
  detail::calls::AllReduce<T, Op> make_all_reduce(std::span<T> values, const Op& op,
                                                  detail::JobCall part_of) {
    return {values, values, values.size(), Rank{0}, op, part_of};
  }

  template <class In, class Out>
  auto make_all_gather(const In& in, Out&& out, detail::JobCall part_of) {
    const auto given = detail::elements_of(in);
    const detail::calls::AllGather<Common<In, Out>> call{
        given, detail::elements_of(out), given.size(), Rank{0}, {}, part_of};
    require_size(call, call.out.size(), call.count * world());
    return call;
  }

  template <class In, class Out, class Op>
  auto make_reduce_scatter(const In& in, Out&& out, const Op& op, detail::JobCall part_of) {
    require_operation<Out, Op>();
    const auto got = detail::elements_of(out);
    const detail::calls::ReduceScatter<Common<In, Out>, Op> call{
        detail::elements_of(in), got, got.size(), Rank{0}, op, part_of};
    require_size(call, call.in.size(), call.count * world());
    return call;
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
    throw Error(std::string(detail::collective_name(kind)),
                "root " + std::to_string(root.value()) + " is not in the world",
                "give a rank below " + std::to_string(world()), self().rank());
  }

  template <class Call>
  void require_size(const Call& call, std::size_t have, std::size_t want) {
    if (have == want) [[likely]]
      return;
    throw Error(call.call().text(),
                "sizes do not fit: " + std::to_string(have) + " elements where " +
                    std::to_string(want) + " are needed",
                "one argument holds a piece for every rank, the other one piece", self().rank());
  }

  void require_peer(const char* operation, Rank peer) {
    if (peer.value() < world() && !is_root(peer)) [[likely]]
      return;
    throw Error(operation,
                "rank " + std::to_string(peer.value()) + " is not another rank of this world",
                "give one below " + std::to_string(world()), self().rank());
  }
};

}  // namespace lockstep
