// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Collectives of device memory among the ranks of one process: the rank that comes last
/// enqueues the work of all ranks, one launch for each GPU. All GPUs can use each other's memory.
///
/// Every byte is loaded once and stored where it is wanted: nothing is staged. Ranks on one GPU
/// share a launch. Ranks on several GPUs divide the elements of an all-reduce among the GPUs; for
/// other collectives each GPU pushes the data that lies on it.

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/comm/backends/threads/lanes.cuh"
#include "lockstep/comm/backends/threads/meeting.hpp"
#include "lockstep/comm/backends/threads/peer_access.cuh"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/combine.cuh"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/launch.cuh"

namespace lockstep::detail::threads {

/// The addresses of arrays, combined by "or", which decide whether packets are aligned.
template <class T>
std::uintptr_t bits_of(const std::vector<T*>& pointers) {
  std::uintptr_t bits = 0;
  for (const T* pointer : pointers) bits |= reinterpret_cast<std::uintptr_t>(pointer);
  return bits;
}

/// The most blocks of a launch of `pieces`, whose threads each have `far` packets of 16 bytes under
/// way to or from other GPUs.
///
/// Where all ranks are on one GPU, blocks fill it. Where GPUs differ, blocks wait for links most of
/// the time, and would keep the model's kernels from the multiprocessors meanwhile: there are as
/// many as keep a link busy. An all-reduce loads through half of it; for NVLink 4 that is 225 GB/s,
/// which 320 KiB under way are at 1.4 us. Less than 16 blocks would not keep the GPU's own memory
/// busy.
inline std::size_t most_blocks(const Lane& lane, std::size_t far, std::size_t pieces) {
  if (lane.is_only) return static_cast<std::size_t>(lane.processors) * (2048 / PacketPass::threads);
  constexpr std::size_t under_way = std::size_t{320} << 10;
  constexpr std::size_t of_block = std::size_t{16} * PacketPass::threads;
  const std::size_t wanted = under_way / of_block / std::max<std::size_t>(far, 1);
  return std::max<std::size_t>(1, std::clamp<std::size_t>(wanted, 16, 32) / pieces);
}

/// Pieces of every rank's memory that are combined on one lane, each into `targets` of the outs.
template <class T>
struct LaneCombination {
  std::vector<const T*> in;
  std::vector<T*> out;
  std::size_t count;  // of one piece, which is also the distance to the next
  std::size_t pieces = 1;
  std::size_t targets = 1;
};

template <std::size_t Ranks, class T, class Op>
void launch_combine(const Lane& lane, const LaneCombination<T>& what, const Op& op) {
  using Values = RankPointers<T, Ranks>;
  if (what.count == 0) return;
  Combination<T, Values, Values::capacity> work{};
  std::copy(what.in.begin(), what.in.end(), work.values.at);
  std::copy(what.out.begin(), what.out.end(), work.out);
  work.pass = PacketPass::cut<T>(what.count, bits_of(what.in) | bits_of(what.out) |
                                                 (what.pieces > 1 ? what.count * sizeof(T) : 0));
  work.stride = what.count;
  work.targets = static_cast<unsigned>(what.targets);
  work.ranks = static_cast<unsigned>(what.in.size());
  const std::size_t most = most_blocks(lane, what.in.size() - lane.ranks, what.pieces);
  launch_kernel<combine<T, Op, Values, Values::capacity>>(
      "combine", lane.stream, work.pass.template grid<T>(most, what.pieces), PacketPass::threads,
      work, op);
}

/// Unrolled over the ranks for common numbers of them.
template <std::size_t Ranks, class T, class Op>
void enqueue_combine(const Lane& lane, const LaneCombination<T>& what, const Op& op) {
  if constexpr (Ranks != dynamic && Ranks <= 16) {
    launch_combine<Ranks>(lane, what, op);
  } else {
    switch (what.in.size()) {
      case 2:
        return launch_combine<2>(lane, what, op);
      case 4:
        return launch_combine<4>(lane, what, op);
      case 8:
        return launch_combine<8>(lane, what, op);
      default:
        return launch_combine<dynamic>(lane, what, op);
    }
  }
}

template <class T>
std::vector<const T*> ins(std::span<const Offer> ranks, std::size_t offset) {
  std::vector<const T*> all;
  for (const Offer& rank : ranks) all.push_back(static_cast<const T*>(rank.in) + offset);
  return all;
}
template <class T>
std::vector<T*> outs(std::span<const Offer> ranks, std::size_t offset) {
  std::vector<T*> all;
  for (const Offer& rank : ranks) all.push_back(static_cast<T*>(rank.out) + offset);
  return all;
}

// Overloads for every call: `Ranks` is the world's size where the compiler knows it.

/// Each lane combines its share of the elements and stores it to all ranks.
template <std::size_t Ranks, class T, class Op>
void enqueue(const calls::AllReduce<T, Op>& call, const Lanes& lanes, std::span<const Offer> ranks,
             std::uint64_t ticket) {
  const std::size_t count = call.count;
  const std::size_t packets = (count + packet_size<T> - 1) / packet_size<T>;
  const std::size_t shares = lanes.all().size();
  std::size_t share = 0;
  lanes.run(ranks, ticket, [&](const Lane& lane) {
    const auto border = [&](std::size_t s) {
      return std::min(count, packets * s / shares * packet_size<T>);
    };
    const std::size_t begin = border(share);
    const std::size_t end = border(++share);
    enqueue_combine<Ranks, T>(lane,
                              LaneCombination<T>{ins<T>(ranks, begin), outs<T>(ranks, begin),
                                                 end - begin, 1, ranks.size()},
                              call.op);
  });
}

template <std::size_t Ranks, class T, class Op>
void enqueue(const calls::Reduce<T, Op>& call, const Lanes& lanes, std::span<const Offer> ranks,
             std::uint64_t ticket) {
  lanes.run(ranks, ticket, [&](const Lane& lane) {
    if (&lane != &lanes.of(call.root)) return;
    T* const out = static_cast<T*>(ranks[call.root.value()].out);
    enqueue_combine<Ranks, T>(lane, LaneCombination<T>{ins<T>(ranks, 0), {out}, call.count},
                              call.op);
  });
}

/// Calls `f(first, ranks)` for the ranks that a launch on this lane is for: all at once where all
/// are on one GPU, else one at a time.
template <class F>
void for_ranks_of(const Lanes& lanes, const Lane& lane, std::size_t world, const F& f) {
  if (lanes.is_one()) return f(0, world);
  for (std::size_t w = 0; w < world; ++w) {
    if (&lane == &lanes.of(Rank{w})) f(w, 1);
  }
}

template <std::size_t Ranks, class T, class Op>
void enqueue(const calls::ReduceScatter<T, Op>& call, const Lanes& lanes,
             std::span<const Offer> ranks, std::uint64_t ticket) {
  lanes.run(ranks, ticket, [&](const Lane& lane) {
    for_ranks_of(lanes, lane, ranks.size(), [&](std::size_t first, std::size_t n) {
      enqueue_combine<Ranks, T>(
          lane,
          LaneCombination<T>{ins<T>(ranks, first * call.count), outs<T>(ranks.subspan(first, n), 0),
                             call.count, n},
          call.op);
    });
  });
}

/// Moves bytes from sources to targets, on one lane. Strides as in `Movement`.
struct Transport {
  std::vector<const unsigned char*> from;
  std::vector<unsigned char*> to;
  std::size_t bytes;
  std::size_t in_stride = 0;
  std::size_t out_stride = 0;
};

inline void enqueue_move(const Lane& lane, const Transport& what) {
  if (what.bytes == 0 || what.to.empty()) return;
  Movement work{};
  std::copy(what.from.begin(), what.from.end(), work.in);
  std::copy(what.to.begin(), what.to.end(), work.out);
  work.pass = PacketPass::cut<unsigned char>(
      what.bytes, bits_of(what.from) | bits_of(what.to) | what.in_stride | what.out_stride);
  work.in_stride = what.in_stride;
  work.out_stride = what.out_stride;
  work.targets = static_cast<unsigned>(what.to.size());
  const std::size_t sources = what.from.size();
  const dim3 blocks = work.pass.grid<unsigned char>(most_blocks(lane, 1, sources), sources);
  if (what.in_stride == 0) {
    launch_kernel<move_bytes<false>>("move_bytes", lane.stream, blocks, PacketPass::threads, work);
  } else {
    launch_kernel<move_bytes<true>>("move_bytes", lane.stream, blocks, PacketPass::threads, work);
  }
}

/// A call that only moves data, from `sources` to the ranks that get any: the `bytes` at
/// in[s] + t * in_stride go to out[t] + i * bytes, where source s is the i-th.
struct Moves {
  std::vector<std::size_t> sources;
  std::vector<std::size_t> targets;
  std::size_t bytes;
  std::size_t in_stride;  // 0 where all targets get the same
};

template <class C>
Moves moves_of(const C& call, std::size_t world) {
  const std::size_t bytes = call.count * sizeof(typename C::element);
  Moves moves{{}, {}, bytes, C::deals_pieces ? bytes : 0};
  for (std::size_t w = 0; w < world; ++w) {
    const bool is_root = Rank{w} == call.root;
    if (C::collects_pieces || is_root) moves.sources.push_back(w);
    if (C::kind == CollectiveKind::gather ? is_root
                                          : C::deals_pieces || !C::is_in_place || !is_root)
      moves.targets.push_back(w);
  }
  return moves;
}

/// Each lane pushes the data that lies on its GPU; where there is one lane, by one launch.
inline void enqueue_moves(const Moves& moves, const Lanes& lanes, std::span<const Offer> ranks,
                          std::uint64_t ticket) {
  lanes.run(ranks, ticket, [&](const Lane& lane) {
    for (std::size_t i = 0; i < moves.sources.size(); ++i) {
      Transport what{{}, {}, moves.bytes, moves.in_stride};
      for (const std::size_t t : moves.targets)
        what.to.push_back(static_cast<unsigned char*>(ranks[t].out) + i * moves.bytes);
      const std::size_t last = lanes.is_one() ? moves.sources.size() : i + 1;
      if (&lane != &lanes.of(Rank{moves.sources[i]})) continue;
      for (std::size_t s = i; s < last; ++s)
        what.from.push_back(static_cast<const unsigned char*>(ranks[moves.sources[s]].in));
      if (what.from.size() > 1) what.out_stride = moves.bytes;
      enqueue_move(lane, what);
      if (lanes.is_one()) return;
    }
  });
}

/// Every call that reduces nothing.
template <std::size_t, class C>
  requires std::same_as<typename C::operation, NoOperation>
void enqueue(const C& call, const Lanes& lanes, std::span<const Offer> ranks,
             std::uint64_t ticket) {
  enqueue_moves(moves_of(call, ranks.size()), lanes, ranks, ticket);
}

}  // namespace lockstep::detail::threads
