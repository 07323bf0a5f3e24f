// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Collectives and messages as MPI's non-blocking calls, one coroutine for each family.

#include "lockstep/detail/comm/combine.hpp"
#include "lockstep/detail/comm/mpi/operation.hpp"

namespace lockstep::detail::over_mpi {

/// The operation of the same `combine` that has no values of its own, as MPI's functions need it;
/// void if there is none.
template <class Op>
struct CombinerOf {
  static constexpr bool is_plain = std::is_empty_v<Op> && std::is_default_constructible_v<Op>;
  using type = std::conditional_t<is_plain, Op, void>;
};
template <>
struct CombinerOf<Average> : CombinerOf<Sum> {};
template <class Factor>
struct CombinerOf<PreMultipliedSum<Factor>> : CombinerOf<Sum> {};
template <class Op>
struct CombinerOf<Combining<Op>> : CombinerOf<Op> {};
template <class Op>
using Combiner = typename CombinerOf<Op>::type;

/// The type that MPI's own sum knows; none for 16-bit floats.
template <class T>
MPI_Datatype summed_type() {
  constexpr ElementKind kind = element_kind<T>();
  if constexpr (kind == ElementKind::f64) return MPI_DOUBLE;
  if constexpr (kind == ElementKind::f32) return MPI_FLOAT;
  if constexpr (kind == ElementKind::i8) return MPI_INT8_T;
  if constexpr (kind == ElementKind::i16) return MPI_INT16_T;
  if constexpr (kind == ElementKind::i32) return MPI_INT32_T;
  if constexpr (kind == ElementKind::i64) return MPI_INT64_T;
  return moved_type<T>();
}

/// MPI's own sum, or a function of ours: MPI's minimum and maximum may hide a NaN.
template <class T, class Op>
MPI_Op library_operation() {
  if constexpr (std::same_as<Op, Sum>) {
    return MPI_SUM;
  } else {
    static const MPI_Op made = [] {
      MPI_Op op = MPI_OP_NULL;
      MPI_User_function* const combine = [](void* in, void* inout, int* count, MPI_Datatype*) {
        const T* const from = static_cast<const T*>(in);
        T* const to = static_cast<T*>(inout);
        for (int i = 0; i < *count; ++i) to[i] = Op{}.combine(from[i], to[i]);
      };
      check_mpi(MPI_Op_create(combine, 1, &op), "MPI_Op_create");
      return Process::get().keep_operation(op);
    }();
    return made;
  }
}

/// Can MPI reduce these elements as this operation promises? It would round the sums of 16-bit
/// floats at each step.
template <class T, class Op>
inline constexpr bool library_reduces =
    sizeof(Prepared<T, Op>) == sizeof(T) && !std::is_void_v<Combiner<Op>>;

/// Calls of MPI count elements by int; larger ones go in parts of this many.
inline constexpr std::size_t most_elements = std::size_t{1} << 30;

/// Reductions of up to so many bytes of all ranks together gather them whole.
inline constexpr std::size_t few_bytes = 16 << 10;

/// A part of a reduction: each rank's slice of it is sent to that rank.
template <class T>
struct Part {
  std::vector<int> slices;   // the number of elements of each rank's slice
  std::vector<int> offsets;  // where each slice begins
  std::vector<int> sent;     // the slices, without this rank's own, which is read where it is
  std::vector<int> counts;   // the elements of this rank's slice, from every other rank
  std::vector<int> places;   // where they go
  std::vector<T> dealt;      // the slice as all other ranks have it, in rank order
  std::vector<T> result;     // the slice, combined, if it must not replace the program's
  std::vector<T*> sources;   // the slice of every rank
  MPI_Request deal = MPI_REQUEST_NULL;
  MPI_Request collect = MPI_REQUEST_NULL;

  /// Slices of `n` elements, cut evenly.
  void cut(std::size_t n, std::size_t world) {
    resize(world);
    for (std::size_t w = 0; w < world; ++w) {
      const std::size_t begin = n * w / world;
      slices[w] = mpi_count(n * (w + 1) / world - begin);
      offsets[w] = mpi_count(begin);
    }
  }
  /// Slices of `n` elements each, `stride` apart.
  void stride(std::size_t n, std::size_t stride, std::size_t world) {
    resize(world);
    for (std::size_t w = 0; w < world; ++w) {
      slices[w] = mpi_count(n);
      offsets[w] = mpi_count(w * stride);
    }
  }
  /// Sends every other rank its slice of `from`.
  void begin(const Operation& op, const T* from) {
    const std::size_t me = op.rank.value();
    const auto mine = static_cast<std::size_t>(slices[me]);
    dealt.resize(std::max(dealt.size(), mine * (op.world - 1)));
    for (std::size_t w = 0, place = 0; w < op.world; ++w) {
      sent[w] = w == me ? 0 : slices[w];
      counts[w] = w == me ? 0 : slices[me];
      places[w] = mpi_count(place);
      sources[w] = w == me ? const_cast<T*>(from) + offsets[me] : dealt.data() + place;
      if (w != me) place += mine;
    }
    check_mpi(MPI_Ialltoallv(from, sent.data(), offsets.data(), moved_type<T>(), dealt.data(),
                             counts.data(), places.data(), moved_type<T>(), op.comm, &deal),
              "MPI_Ialltoallv");
  }
  /// `out` = op over all ranks' slices, in rank order. `out` may be this rank's.
  template <class Op>
  void combine(std::span<T> out, const Op& op) const {
    const auto unrolled = [&](const auto*... source) {
      T* const to = out.data();
      const std::size_t n = out.size();
#pragma GCC ivdep
      for (std::size_t i = 0; i < n; ++i) to[i] = combined<T>(op, source[i]...);
    };
    if (with_unrolled<dynamic>(std::span<T* const>(sources), unrolled)) return;
    combine_blocks<dynamic, T>(
        sources.size(), 0, out.size(), op, [&](std::size_t w) { return sources[w]; },
        [&](std::size_t i, std::span<const T> results) {
          copy_elements(results.data(), out.data() + i, results.size());
        });
  }

 private:
  void resize(std::size_t world) {
    for (std::vector<int>* numbers : {&slices, &offsets, &sent, &counts, &places})
      numbers->resize(world);
    sources.resize(world);
  }
};

/// Reduces in rank order: each rank combines one slice, between an all-to-all and a gather, which
/// costs as many bytes as a ring. Large data goes in parts that stay in caches, two at a time: this
/// is faster than MPI_Allreduce. Few bytes are gathered whole, in one step.
template <class C>
Flow reduce_in_rank_order(Operation& op, C call) {
  using T = typename C::element;
  constexpr bool scatters = C::kind == CollectiveKind::reduce_scatter;
  constexpr bool keeps = C::kind == CollectiveKind::reduce;  // data stays as it is but on root
  constexpr std::size_t part_bytes = 512 << 10;
  constexpr std::size_t slice_bytes = 32 << 10;  // at least, in a world of many
  co_await op.agreed();
  const std::size_t world = op.world;
  const std::size_t me = op.rank.value();
  const MPI_Datatype type = moved_type<T>();
  const int root = static_cast<int>(call.root.value());
  const bool takes = !keeps || op.rank == call.root;
  op.holds_memory = call.count != 0;

  if constexpr (!scatters) {
    if (call.count * sizeof(T) * world <= few_bytes && call.count != 0) {
      std::vector<T> all(takes ? call.count * world : 0);
      const int n = mpi_count(call.count);
      MPI_Request gather = MPI_REQUEST_NULL;
      check_mpi(
          keeps ? MPI_Igather(call.in.data(), n, type, all.data(), n, type, root, op.comm, &gather)
                : MPI_Iallgather(call.in.data(), n, type, all.data(), n, type, op.comm, &gather),
          "MPI_Iallgather");
      op.has_begun_all = true;
      co_await Done(gather);
      if (takes) HostPasses::combine(std::span<const T>(all), call.out, call.op);
      co_return;
    }
  }

  const std::size_t width =
      std::max(part_bytes, slice_bytes * world) / sizeof(T) / (scatters ? world : 1);
  std::array<Part<T>, 2> parts;
  const auto deal = [&](std::size_t begin) {
    Part<T>& part = parts[begin / width % 2];
    const std::size_t n = std::min(width, call.count - begin);
    if constexpr (scatters) {
      part.stride(n, call.count, world);
    } else {
      part.cut(n, world);
    }
    part.begin(op, call.in.data() + begin);
  };
  if (call.count != 0) deal(0);
  for (std::size_t begin = 0; begin < call.count; begin += width) {
    Part<T>& part = parts[begin / width % 2];
    if (begin + width < call.count) {
      co_await Done(parts[(begin / width + 1) % 2].collect);
      deal(begin + width);
    }
    co_await Done(part.deal);
    const auto mine = static_cast<std::size_t>(part.slices[me]);
    if constexpr (scatters) {
      part.combine(call.out.subspan(begin, mine), call.op);
    } else {
      if (!takes) part.result.resize(mine);
      T* const to = takes ? call.out.data() + begin : nullptr;
      const std::span<T> slice =
          takes ? std::span<T>(to + part.offsets[me], mine) : std::span<T>(part.result);
      part.combine(slice, call.op);
      check_mpi(!keeps  ? MPI_Iallgatherv(MPI_IN_PLACE, 0, type, to, part.slices.data(),
                                          part.offsets.data(), type, op.comm, &part.collect)
                : takes ? MPI_Igatherv(MPI_IN_PLACE, 0, type, to, part.slices.data(),
                                       part.offsets.data(), type, root, op.comm, &part.collect)
                        : MPI_Igatherv(slice.data(), part.slices[me], type, nullptr, nullptr,
                                       nullptr, type, root, op.comm, &part.collect),
                "MPI_Iallgatherv");
    }
  }
  op.has_begun_all = true;
  for (Part<T>& part : parts) co_await Done(part.collect);
}

/// Reduces by MPI's own reductions, in the order that MPI chooses.
template <class C>
Flow reduce_by_library(Operation& op, C call) {
  using T = typename C::element;
  using Op = typename C::operation;
  const MPI_Datatype type = summed_type<T>();
  const MPI_Op operation = library_operation<T, Combiner<Op>>();
  co_await op.agreed();
  op.holds_memory = call.count != 0;
  std::vector<T> values;  // what this rank gives, where it must not change what the program has
  const T* from = call.in.data();
  if (requires { call.op.factor; } || C::kind == CollectiveKind::reduce_scatter) {
    values.resize(call.in.size());
    HostPasses::prepare(call.in, std::span<T>(values), call.op);
    from = values.data();
  }
  const std::size_t parts = (call.count + most_elements - 1) / most_elements;
  if (C::kind == CollectiveKind::reduce_scatter && parts > 1) mpi_count(call.count);  // throws
  for (std::size_t begin = 0; begin < call.count; begin += most_elements) {
    const int n = mpi_count(std::min(most_elements, call.count - begin));
    T* const to = call.out.empty() ? nullptr : call.out.data() + begin;
    const bool is_in_place = from + begin == to;
    const void* const give = is_in_place ? MPI_IN_PLACE : from + begin;
    MPI_Request request = MPI_REQUEST_NULL;
    if constexpr (C::kind == CollectiveKind::all_reduce) {
      check_mpi(MPI_Iallreduce(give, to, n, type, operation, op.comm, &request), "MPI_Iallreduce");
    } else if constexpr (C::kind == CollectiveKind::reduce) {
      check_mpi(MPI_Ireduce(give, to, n, type, operation, static_cast<int>(call.root.value()),
                            op.comm, &request),
                "MPI_Ireduce");
    } else {
      check_mpi(MPI_Ireduce_scatter_block(give, to, n, type, operation, op.comm, &request),
                "MPI_Ireduce_scatter_block");
    }
    op.has_begun_all = begin + most_elements >= call.count;
    co_await Done(request);
  }
  // Elements were not widened, so narrowing is no step here.
  if constexpr (!std::derived_from<Op, Narrowing>)
    HostPasses::finish(std::span<const T>(call.out), call.out, call.op, op.world);
}

/// Barrier, broadcast, gathers, scatter and all-to-all.
template <class C>
Flow move_elements(Operation& op, C call) {
  using T = typename C::element;
  using enum CollectiveKind;
  const MPI_Datatype type = moved_type<T>();
  const int root = static_cast<int>(call.root.value());
  MPI_Request request = MPI_REQUEST_NULL;
  co_await op.agreed();
  op.holds_memory = call.count != 0;
  if constexpr (C::kind == broadcast) {
    for (std::size_t begin = 0; begin < call.count; begin += most_elements) {
      const int n = mpi_count(std::min(most_elements, call.count - begin));
      check_mpi(MPI_Ibcast(call.data().data() + begin, n, type, root, op.comm, &request),
                "MPI_Ibcast");
      op.has_begun_all = begin + most_elements >= call.count;
      co_await Done(request);
    }
  } else if constexpr (C::kind != barrier) {
    const int n = mpi_count(call.count);
    const T* const in = call.in.data();
    T* const out = call.out.data();
    if (call.count == 0) co_return;
    if constexpr (C::kind == all_gather) {
      const bool is_in_place = in == out + op.rank.value() * call.count;
      check_mpi(
          MPI_Iallgather(is_in_place ? MPI_IN_PLACE : in, n, type, out, n, type, op.comm, &request),
          "MPI_Iallgather");
    } else if constexpr (C::kind == gather) {
      check_mpi(MPI_Igather(in, n, type, out, n, type, root, op.comm, &request), "MPI_Igather");
    } else if constexpr (C::kind == scatter) {
      check_mpi(MPI_Iscatter(in, n, type, out, n, type, root, op.comm, &request), "MPI_Iscatter");
    } else {
      static_assert(C::kind == all_to_all);
      check_mpi(MPI_Ialltoall(in, n, type, out, n, type, op.comm, &request), "MPI_Ialltoall");
    }
    op.has_begun_all = true;
    co_await Done(request);
  }
}

/// A message, after its description, which the receiver compares.
template <class C>
Flow pass_message(Operation& op, C call) {
  using T = typename C::element;
  constexpr bool sends = C::kind == CollectiveKind::send;
  constexpr int tag = 0;  // messages between two ranks keep their order
  const int peer = static_cast<int>(call.root.value());
  Call said = call.call();
  MPI_Request head = MPI_REQUEST_NULL;
  if constexpr (sends) {
    check_mpi(MPI_Isend(&said, sizeof said, MPI_BYTE, peer, tag, op.comm, &head), "MPI_Isend");
  } else {
    check_mpi(MPI_Irecv(&said, sizeof said, MPI_BYTE, peer, tag, op.comm, &head), "MPI_Irecv");
    co_await Done(head);
    if (said.kind != CollectiveKind::send || !said.carries_the_same_as(call.call()))
      throw messages_differ(call.call(), call.root, said.text(), op.rank);
  }
  op.holds_memory = call.count != 0;
  for (std::size_t begin = 0; begin < call.count; begin += most_elements) {
    const int n = mpi_count(std::min(most_elements, call.count - begin));
    MPI_Request body = MPI_REQUEST_NULL;
    if constexpr (sends) {
      check_mpi(MPI_Isend(call.in.data() + begin, n, moved_type<T>(), peer, tag, op.comm, &body),
                "MPI_Isend");
    } else {
      check_mpi(MPI_Irecv(call.out.data() + begin, n, moved_type<T>(), peer, tag, op.comm, &body),
                "MPI_Irecv");
    }
    co_await Done(body);
  }
  co_await Done(head);
}

/// The flow of a call; `InRankOrder` decides who reduces.
template <bool InRankOrder, class C>
Flow flow_of(Operation& op, const C& call) {
  if constexpr (C::is_message) {
    return pass_message(op, call);
  } else if constexpr (std::same_as<typename C::operation, NoOperation>) {
    return move_elements(op, call);
  } else if constexpr (InRankOrder ||
                       !library_reduces<typename C::element, typename C::operation>) {
    return reduce_in_rank_order(op, call);
  } else {
    return reduce_by_library(op, call);
  }
}

}  // namespace lockstep::detail::over_mpi
