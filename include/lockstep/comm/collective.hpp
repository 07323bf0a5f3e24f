// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A collective call of one rank as a value: what the rank gives, what it gets, and how
/// the two are related. The front makes these values, backends execute them, adapters pass them
/// on.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "lockstep/comm/call.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/view.hpp"

namespace lockstep::detail {

/// One number, in place of memory that holds several.
template <class T>
concept SingleElement = Element<T> || std::same_as<T, bool>;

/// Elements as they travel: a bool is a byte that is 0 or 1.
template <class T>
auto travelling(std::span<T> values) {
  if constexpr (std::same_as<std::remove_const_t<T>, bool>) {
    static_assert(sizeof(bool) == 1);
    using Byte = std::conditional_t<std::is_const_v<T>, const std::uint8_t, std::uint8_t>;
    return std::span<Byte>(reinterpret_cast<Byte*>(values.data()), values.size());
  } else {
    return values;
  }
}

/// Is this memory of elements that collectives move? Of packed bits, `flat` says why it is not.
template <class Data>
consteval bool holds_elements() {
  using Plain = std::remove_cvref_t<Data>;
  if constexpr (packs_bits<Plain>) {
    return true;
  } else if constexpr (DenseView<Plain> || ContiguousMemory<Plain>) {
    return SingleElement<std::remove_const_t<FlatElement<Data>>>;
  } else {
    return false;
  }
}

/// The elements of an argument, as they travel. An argument that has none is one error: what
/// follows sees a span of floats.
template <class Data>
auto elements_of(Data&& data) {
  constexpr bool fits = holds_elements<Data>();
  static_assert(fits,
                "lockstep: a collective takes memory of numbers or bools (a span, vector, array or "
                "view); their types are double, float, Half, BFloat16, integers and bool");
  if constexpr (fits) {
    return travelling(flat(data));
  } else {
    return std::span<float>();
  }
}
template <class Data>
using ElementsOf = typename decltype(elements_of(std::declval<Data&>()))::element_type;

/// The operations of bool: those whose result is 0 or 1 again.
template <class Op>
inline constexpr bool is_logical =
    std::same_as<Op, Min> || std::same_as<Op, Max> || std::same_as<Op, BitAnd> ||
    std::same_as<Op, BitOr> || std::same_as<Op, BitXor>;

/// The element type that both arguments of a collective have. Not a member of the front: nvcc
/// writes this type's name into code outside of it.
template <class In, class Out>
struct CommonElement {
  using type = ElementsOf<Out>;
  static_assert(std::same_as<std::remove_const_t<ElementsOf<const In>>, type>,
                "lockstep: a collective's arguments have one element type");
};

/// The operation of a collective that reduces nothing.
struct NoOperation {};

/// `in` and `out` consist of pieces of `count` elements each: one piece, or one for every rank, in
/// rank order. `in` is empty on a rank that gives nothing (every rank but the root of a scatter),
/// `out` on a rank that gets nothing. A call in place has the same memory as both.
template <CollectiveKind Kind, class T, class Operation = NoOperation>
struct Collective {
  static constexpr CollectiveKind kind = Kind;
  using element = T;
  using operation = Operation;

  std::span<const T> in;
  std::span<T> out;
  std::size_t count = 0;  // elements of one piece, the same on all ranks
  Rank root{0};           // of a rooted collective; of a message the other rank
  [[no_unique_address]] Operation op{};
  JobCall part_of = JobCall::none;

  /// Does `in` hold a piece for every rank, where it holds anything?
  static constexpr bool deals_pieces = kind == CollectiveKind::scatter ||
                                       kind == CollectiveKind::reduce_scatter ||
                                       kind == CollectiveKind::all_to_all;
  /// Does `out` hold a piece of every rank, where it holds anything?
  static constexpr bool collects_pieces = kind == CollectiveKind::all_gather ||
                                          kind == CollectiveKind::gather ||
                                          kind == CollectiveKind::all_to_all;
  /// Does the result take the place of what was given?
  static constexpr bool is_in_place = kind == CollectiveKind::all_reduce ||
                                      kind == CollectiveKind::reduce ||
                                      kind == CollectiveKind::broadcast;
  static constexpr bool is_message =
      kind == CollectiveKind::send || kind == CollectiveKind::receive;

  /// The same call on other memory, with pieces of another length.
  constexpr Collective on(std::span<const T> other_in, std::span<T> other_out,
                          std::size_t other_count) const {
    return {other_in, other_out, other_count, root, op, part_of};
  }

  /// The data of a call in place.
  constexpr std::span<T> data() const
    requires is_in_place
  {
    return {out.empty() ? const_cast<T*>(in.data()) : out.data(), count};
  }

  /// The description that other ranks compare with theirs.
  constexpr Call call() const {
    Call described;
    described.kind = kind;
    described.part_of = part_of;
    described.element = element_kind<T>();
    described.root = static_cast<std::uint16_t>(root.value());
    // The number of elements that errors show: all that a rank gives, or those of one piece.
    described.count = deals_pieces && kind != CollectiveKind::scatter ? in.size() : count;
    if constexpr (requires { Operation::name; }) described.with(Operation::name);
    return described;
  }
};

/// The calls by their names.
namespace calls {

using Barrier = Collective<CollectiveKind::barrier, std::uint8_t>;
template <class T, class Op>
using AllReduce = Collective<CollectiveKind::all_reduce, T, Op>;
template <class T, class Op>
using Reduce = Collective<CollectiveKind::reduce, T, Op>;
template <class T>
using Broadcast = Collective<CollectiveKind::broadcast, T>;
template <class T>
using AllGather = Collective<CollectiveKind::all_gather, T>;
template <class T>
using Gather = Collective<CollectiveKind::gather, T>;
template <class T>
using Scatter = Collective<CollectiveKind::scatter, T>;
template <class T, class Op>
using ReduceScatter = Collective<CollectiveKind::reduce_scatter, T, Op>;
template <class T>
using AllToAll = Collective<CollectiveKind::all_to_all, T>;
template <class T>
using Send = Collective<CollectiveKind::send, T>;
template <class T>
using Receive = Collective<CollectiveKind::receive, T>;

/// Every rank's `in`, one behind the other.
template <class T>
constexpr AllGather<T> all_gather(std::span<const T> in, std::span<T> out) {
  return {in, out, in.size()};
}
template <class T>
constexpr Send<T> send(std::span<const T> data, Rank to) {
  return {data, {}, data.size(), to};
}
template <class T>
constexpr Receive<T> receive(std::span<T> data, Rank from) {
  return {{}, data, data.size(), from};
}

}  // namespace calls
}  // namespace lockstep::detail
