// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Generic forms of the collectives that a backend lacks, made of messages and those it has.

#include "lockstep/detail/comm/call/peers.hpp"
#include "lockstep/detail/comm/combine.hpp"

namespace lockstep::detail {

template <class B, class C>
concept Executes = requires(B& backend, const C& call) { backend.execute(call); };

/// Executes a call that all ranks have agreed on: by the backend's `execute`, or the generic form.
template <class B, class C>
void execute_any(B& backend, const C& call) {
  if constexpr (Executes<B, C>) {
    backend.execute(call);
  } else {
    execute_generically(backend, call);
  }
}

/// Throws on all ranks unless all describe the same call. **Host** blocks until all have arrived.
template <class B>
void compare_gathered(B& backend, const Call& call) {
  const std::size_t world = backend.world_size().value();
  std::vector<Call> all(world);
  const std::span<std::uint8_t> bytes(reinterpret_cast<std::uint8_t*>(all.data()),
                                      world * sizeof(Call));
  const std::span<const std::uint8_t> own(reinterpret_cast<const std::uint8_t*>(&call),
                                          sizeof(Call));
  execute_any(backend, calls::all_gather<std::uint8_t>(own, bytes));
  const auto error = find_disagreement(
      0, world, [&](std::size_t w) -> const Call& { return all[w]; }, backend.rank());
  if (error) throw Error(call.text(), error->problem(), error->advice(), backend.rank());
}

/// Sends the message's description ahead of it; the receiver throws if the two calls do not match.
template <class B, class C>
void announce_message(B& backend, const C& message) {
  Call said = message.call();
  const std::span<std::uint8_t> head(reinterpret_cast<std::uint8_t*>(&said), sizeof said);
  if constexpr (C::kind == CollectiveKind::send) {
    backend.execute(calls::send<std::uint8_t>(head, message.root));
  } else {
    backend.execute(calls::receive<std::uint8_t>(head, message.root));
    if (said.kind != CollectiveKind::send || !said.carries_the_same_as(message.call()))
      throw messages_differ(message.call(), message.root, said.text(), backend.rank());
  }
}

/// Performs a call for a backend that does not compare calls itself. An error aborts all ranks.
template <class B, class C>
void compare_and_execute(B& backend, const C& call) {
  try {
    if constexpr (C::is_message) {
      announce_message(backend, call);
    } else {
      compare_gathered(backend, call.call());
    }
    if constexpr (C::kind != CollectiveKind::barrier) execute_any(backend, call);
  } catch (const Error& error) {
    const Error named = with_context(error, call.call().text(), error.problem(), error.rank());
    backend.abort(named.text());
    throw named;
  }
}

/// Calls `f()`, whose messages a backend may group; their order avoids deadlock if messages block.
template <class B, class F>
void together(B& backend, const F& f) {
  if constexpr (requires { backend.grouped(f); }) {
    backend.grouped(f);
  } else {
    f();
  }
}

/// Sends the `count` elements at `w * stride` of `in` to every rank w, and receives those of rank v
/// at `v * count` of `out`. Messages may block: in round s every rank meets the partner whose rank
/// and its own add up to s (modulo the world size), and the lower rank sends first.
template <class B, class T>
void exchange(B& backend, std::span<const T> in, std::size_t stride, std::span<T> out,
              std::size_t count) {
  const std::size_t world = backend.world_size().value();
  const std::size_t me = backend.rank().value();
  together(backend, [&] {
    for (std::size_t round = 0; round < world; ++round) {
      const std::size_t partner = (round + world - me) % world;
      const std::span<const T> outgoing = in.subspan(partner * stride, count);
      const std::span<T> incoming = out.subspan(partner * count, count);
      if (partner == me) {
        passes_of(backend).copy(outgoing, incoming);
        continue;
      }
      if (me < partner) backend.execute(calls::send<T>(outgoing, Rank{partner}));
      backend.execute(calls::receive<T>(incoming, Rank{partner}));
      if (me > partner) backend.execute(calls::send<T>(outgoing, Rank{partner}));
    }
  });
}

template <class B, class T>
void execute_generically(B& backend, const calls::AllGather<T>& call) {
  exchange(backend, call.in, 0, call.out, call.count);
}

/// On the root, calls `f(w, begin)` for every rank w, whose piece begins at element `begin`.
template <class B, class F>
void for_each_piece(B& backend, std::size_t count, const F& f) {
  together(backend, [&] {
    for (std::size_t w = 0; w < backend.world_size().value(); ++w) f(Rank{w}, w * count);
  });
}

template <class B, class T>
void execute_generically(B& backend, const calls::Broadcast<T>& call) {
  if (backend.rank() != call.root) return backend.execute(calls::receive<T>(call.out, call.root));
  for_each_piece(backend, 0, [&](Rank to, std::size_t) {
    if (to != call.root) backend.execute(calls::send<T>(call.in, to));
  });
}

template <class B, class T>
void execute_generically(B& backend, const calls::Gather<T>& call) {
  if (backend.rank() != call.root) return backend.execute(calls::send<T>(call.in, call.root));
  for_each_piece(backend, call.count, [&](Rank from, std::size_t begin) {
    const std::span<T> piece = call.out.subspan(begin, call.count);
    if (from == call.root) return passes_of(backend).copy(call.in, piece);
    backend.execute(calls::receive<T>(piece, from));
  });
}

template <class B, class T>
void execute_generically(B& backend, const calls::Scatter<T>& call) {
  if (backend.rank() != call.root) return backend.execute(calls::receive<T>(call.out, call.root));
  for_each_piece(backend, call.count, [&](Rank to, std::size_t begin) {
    const std::span<const T> piece = call.in.subspan(begin, call.count);
    if (to == call.root) return passes_of(backend).copy(piece, call.out);
    backend.execute(calls::send<T>(piece, to));
  });
}

template <class B, class T>
void execute_generically(B& backend, const calls::AllToAll<T>& call) {
  exchange(backend, call.in, call.count, call.out, call.count);
}

// Reducing: pieces are gathered and combined in rank order, as much as scratch memory holds.

template <class B, class T>
auto scratch_of(B& backend, const T* like, std::size_t wanted, std::size_t least) {
  if constexpr (requires { backend.scratch(like, wanted, least); }) {
    return backend.scratch(like, wanted, least);
  } else {
    return passes_of(backend).scratch(like, wanted, least);
  }
}

/// Calls `part(scratch, begin, n)` for all of `count`, with scratch for n elements of every rank.
template <class B, class T, class Part>
void in_parts(B& backend, const T* like, std::size_t count, const Part& part) {
  if (count == 0) return;
  const std::size_t world = backend.world_size().value();
  auto memory = scratch_of(backend, like, count * world, world);
  const std::span<T> scratch(memory);
  for (std::size_t begin = 0; begin < count;) {
    const std::size_t n = std::min(scratch.size() / world, count - begin);
    part(scratch.first(n * world), begin, n);
    begin += n;
  }
}

template <class B, class T, class Op>
void execute_generically(B& backend, const calls::AllReduce<T, Op>& call) {
  in_parts(backend, call.out.data(), call.count,
           [&](std::span<T> all, std::size_t begin, std::size_t n) {
             execute_any(backend, calls::all_gather<T>(call.in.subspan(begin, n), all));
             passes_of(backend).combine(std::span<const T>(all), call.out.subspan(begin, n),
                                        call.op);
           });
}

template <class B, class T, class Op>
void execute_generically(B& backend, const calls::Reduce<T, Op>& call) {
  const bool takes = backend.rank() == call.root;
  in_parts(
      backend, call.in.data(), call.count, [&](std::span<T> all, std::size_t begin, std::size_t n) {
        execute_any(backend,
                    calls::Gather<T>{call.in.subspan(begin, n), takes ? all : std::span<T>(), n,
                                     call.part_of, call.root});
        if (takes)
          passes_of(backend).combine(std::span<const T>(all), call.out.subspan(begin, n), call.op);
      });
}

template <class B, class T, class Op>
void execute_generically(B& backend, const calls::ReduceScatter<T, Op>& call) {
  const auto combine = [&](std::span<const T> all, std::size_t begin, std::size_t n) {
    passes_of(backend).combine(all, call.out.subspan(begin, n), call.op);
  };
  if (call.count == 0) return;
  if constexpr (Executes<B, calls::AllToAll<T>>) {
    const std::size_t all = call.in.size();
    auto memory = scratch_of(backend, call.out.data(), all, all);
    const std::span<T> pieces = std::span<T>(memory).first(all);
    backend.execute(calls::AllToAll<T>{call.in, pieces, call.count});
    combine(pieces, 0, call.count);
  } else {
    in_parts(backend, call.out.data(), call.count,
             [&](std::span<T> all, std::size_t begin, std::size_t n) {
               exchange(backend, call.in.subspan(begin), call.count, all, n);
               combine(all, begin, n);
             });
  }
}

}  // namespace lockstep::detail
