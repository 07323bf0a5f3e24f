// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Collectives of device memory among the ranks of one process: the rank that comes last
/// enqueues the work of all ranks.
///
/// Where all GPUs can use each other's memory, there is one launch for each GPU. Every byte is
/// loaded once and stored where it is wanted: nothing is staged. Ranks on one GPU share a launch.
/// Ranks on several GPUs divide the elements of an all-reduce among the GPUs; for other collectives
/// each GPU pushes the data that lies on it.
///
/// Where GPUs cannot, every lane works on its own GPU's memory and on pinned host memory, through
/// which the other ranks' data comes, a piece at a time: lanes copy their ranks' data to the host,
/// meet, and take what they need from there. Values are combined by the same kernel and in the same
/// order, so that results are the same bits. There are copies, kernels and events only, all on the
/// lanes' streams: it can be captured, and nothing is allocated.

#include <cuda_runtime_api.h>
#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/comm/backends/threads/lanes.cuh"
#include "lockstep/comm/backends/threads/meeting.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/combine.cuh"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/runtime.cuh"

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

/// Every rank's memory, `offset` elements behind its beginning: `pointers<const T>(ranks,
/// &Offer::in)`.
template <class T, class Pointer>
std::vector<T*> pointers(std::span<const Offer> ranks, Pointer Offer::* which,
                         std::size_t offset = 0) {
  std::vector<T*> all;
  for (const Offer& rank : ranks) all.push_back(static_cast<T*>(rank.*which) + offset);
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
    enqueue_combine<Ranks, T>(
        lane,
        LaneCombination<T>{pointers<const T>(ranks, &Offer::in, begin),
                           pointers<T>(ranks, &Offer::out, begin), end - begin, 1, ranks.size()},
        call.op);
  });
}

template <std::size_t Ranks, class T, class Op>
void enqueue(const calls::Reduce<T, Op>& call, const Lanes& lanes, std::span<const Offer> ranks,
             std::uint64_t ticket) {
  lanes.run(ranks, ticket, [&](const Lane& lane) {
    if (&lane != &lanes.of(call.root)) return;
    T* const out = static_cast<T*>(ranks[call.root.value()].out);
    enqueue_combine<Ranks, T>(
        lane, LaneCombination<T>{pointers<const T>(ranks, &Offer::in), {out}, call.count}, call.op);
  });
}

/// One launch on each lane: for all ranks at once where all are on one GPU, else for one at a time.
template <std::size_t Ranks, class T, class Op>
void enqueue(const calls::ReduceScatter<T, Op>& call, const Lanes& lanes,
             std::span<const Offer> ranks, std::uint64_t ticket) {
  lanes.run(ranks, ticket, [&](const Lane& lane) {
    const auto combine_for = [&](std::size_t first, std::size_t n) {
      enqueue_combine<Ranks, T>(
          lane,
          LaneCombination<T>{pointers<const T>(ranks, &Offer::in, first * call.count),
                             pointers<T>(ranks.subspan(first, n), &Offer::out), call.count, n},
          call.op);
    };
    if (lanes.is_one()) return combine_for(0, ranks.size());
    lanes.for_ranks_on(lane, [&](std::size_t w) { combine_for(w, 1); });
  });
}

/// Moves `bytes` from each of `sources` to the targets, on one lane. The pass is cut here.
inline void enqueue_move(const Lane& lane, Movement& work, std::size_t sources, std::size_t bytes) {
  if (bytes == 0 || work.targets == 0) return;
  std::uintptr_t bits = work.in_stride | work.out_stride;
  for (std::size_t s = 0; s < sources; ++s) bits |= reinterpret_cast<std::uintptr_t>(work.in[s]);
  for (std::size_t t = 0; t < work.targets; ++t)
    bits |= reinterpret_cast<std::uintptr_t>(work.out[t]);
  work.pass = PacketPass::cut<unsigned char>(bytes, bits);
  const dim3 blocks = work.pass.grid<unsigned char>(most_blocks(lane, 1, sources), sources);
  if (work.in_stride == 0) {
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
      if (&lane != &lanes.of(Rank{moves.sources[i]})) continue;
      Movement work{};
      work.in_stride = moves.in_stride;
      for (const std::size_t t : moves.targets)
        work.out[work.targets++] = static_cast<unsigned char*>(ranks[t].out) + i * moves.bytes;
      const std::size_t n = lanes.is_one() ? moves.sources.size() : 1;
      for (std::size_t s = 0; s < n; ++s)
        work.in[s] = static_cast<const unsigned char*>(ranks[moves.sources[i + s]].in);
      if (n > 1) work.out_stride = moves.bytes;
      enqueue_move(lane, work, n, moves.bytes);
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

/// **Stream** the lane's.
inline void copy_on(const Lane& lane, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, lane.stream), "cudaMemcpyAsync");
}

/// Copies `rows` of `bytes` each, which begin `from_pitch` bytes apart, to rows `to_pitch` apart.
inline void copy_rows_on(const Lane& lane, unsigned char* to, std::size_t to_pitch,
                         const unsigned char* from, std::size_t from_pitch, std::size_t bytes,
                         std::size_t rows) {
  constexpr std::size_t most_pitch = 0x7fffffff;  // of every device
  if (rows > 1 && std::max(from_pitch, to_pitch) <= most_pitch) {
    check_cuda(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, bytes, rows, cudaMemcpyDefault,
                                 lane.stream),
               "cudaMemcpy2DAsync");
    return;
  }
  for (std::size_t r = 0; r < rows; ++r)
    copy_on(lane, to + r * to_pitch, from + r * from_pitch, bytes);
}

/// Calls `stage(first, count)` for pieces of at most `most` elements.
template <class Stage>
void run_in_pieces(const Lanes& lanes, std::span<const Offer> ranks, std::uint64_t ticket,
                   std::size_t count, std::size_t most, const Stage& stage) {
  lanes.run_in_stages(ranks, ticket, [&] {
    for (std::size_t first = 0; first < count; first += most)
      stage(first, std::min(most, count - first));
  });
}

/// Every rank's values from `first` on, as a lane reads them: its own ranks' where they are, those
/// of other ranks from the host, where they begin `staged` elements into the slot.
template <class T>
std::vector<const T*> near_ins(const Lanes& lanes, const Lane& lane, std::span<const Offer> ranks,
                               std::size_t first, std::size_t staged) {
  std::vector<const T*> all;
  for (std::size_t w = 0; w < ranks.size(); ++w) {
    const bool is_near = &lane == &lanes.of(Rank{w});
    all.push_back(is_near ? static_cast<const T*>(ranks[w].in) + first
                          : reinterpret_cast<const T*>(lanes.staging()->of(w)) + staged);
  }
  return all;
}

/// Each lane combines its share of a piece, and stores it to its own ranks and to the host, where
/// the others take it from.
template <std::size_t Ranks, class T, class Op>
void enqueue_staged(const calls::AllReduce<T, Op>& call, const Lanes& lanes,
                    std::span<const Offer> ranks, std::uint64_t ticket) {
  const Staging& staging = *lanes.staging();
  const std::size_t shares = lanes.all().size();
  T* const result = reinterpret_cast<T*>(staging.result());
  const auto stage = [&](std::size_t first, std::size_t count) {
    const std::size_t packets = (count + packet_size<T> - 1) / packet_size<T>;
    const auto border = [&](const Lane& lane, std::size_t next) {
      const auto share = static_cast<std::size_t>(&lane - lanes.all().data()) + next;
      return std::min(count, packets * share / shares * packet_size<T>);
    };
    // A lane's own share need not leave its GPU, nor come back.
    const auto copy_other_shares = [&](const Lane& lane, T* to, const T* from) {
      const std::size_t end = border(lane, 1);
      copy_on(lane, to, from, border(lane, 0) * sizeof(T));
      copy_on(lane, to + end, from + end, (count - end) * sizeof(T));
    };
    lanes.each_rank([&](const Lane& lane, std::size_t w) {
      copy_other_shares(lane, reinterpret_cast<T*>(staging.of(w)),
                        static_cast<const T*>(ranks[w].in) + first);
    });
    lanes.meet();
    lanes.each([&](const Lane& lane) {
      const std::size_t begin = border(lane, 0);
      std::vector<T*> outs{result + begin};
      lanes.for_ranks_on(lane, [&](std::size_t w) {
        outs.push_back(static_cast<T*>(ranks[w].out) + first + begin);
      });
      const std::size_t targets = outs.size();
      enqueue_combine<Ranks, T>(
          lane,
          LaneCombination<T>{near_ins<T>(lanes, lane, ranks, first + begin, begin), std::move(outs),
                             border(lane, 1) - begin, 1, targets},
          call.op);
    });
    lanes.meet();
    lanes.each_rank([&](const Lane& lane, std::size_t w) {
      copy_other_shares(lane, static_cast<T*>(ranks[w].out) + first, result);
    });
  };
  run_in_pieces(lanes, ranks, ticket, call.count, staging.bytes() / sizeof(T), stage);
}

/// The lanes of the ranks that get a result combine what lies on their GPU and what the others have
/// brought to the host. A slot has a part for each such rank: the root of a reduction, or all.
template <std::size_t Ranks, CollectiveKind Kind, class T, class Op>
void enqueue_staged(const Collective<Kind, T, Op>& call, const Lanes& lanes,
                    std::span<const Offer> ranks, std::uint64_t ticket) {
  constexpr bool is_rooted = Kind == CollectiveKind::reduce;
  const Staging& staging = *lanes.staging();
  const std::size_t rows = is_rooted ? 1 : ranks.size();
  const std::size_t part = staging.bytes() / rows / sizeof(T);
  const auto stage = [&](std::size_t first, std::size_t count) {
    lanes.each_rank([&](const Lane& lane, std::size_t w) {
      if (is_rooted && &lane == &lanes.of(call.root)) return;
      copy_rows_on(
          lane, staging.of(w), part * sizeof(T),
          reinterpret_cast<const unsigned char*>(static_cast<const T*>(ranks[w].in) + first),
          call.count * sizeof(T), count * sizeof(T), rows);
    });
    lanes.meet();
    lanes.each_rank([&](const Lane& lane, std::size_t w) {
      if (is_rooted && Rank{w} != call.root) return;
      const std::size_t row = is_rooted ? 0 : w;
      T* const out = static_cast<T*>(ranks[w].out) + first;
      enqueue_combine<Ranks, T>(
          lane,
          LaneCombination<T>{
              near_ins<T>(lanes, lane, ranks, row * call.count + first, row * part), {out}, count},
          call.op);
    });
    lanes.meet();
  };
  run_in_pieces(lanes, ranks, ticket, call.count, part, stage);
}

/// Sources go to their slots on the host, from where the targets on other GPUs take them.
inline void enqueue_staged_moves(const Moves& moves, const Lanes& lanes,
                                 std::span<const Offer> ranks, std::uint64_t ticket) {
  const Staging& staging = *lanes.staging();
  const std::size_t world = ranks.size();
  const bool is_dealt = moves.in_stride != 0;
  const std::size_t part = staging.bytes() / (is_dealt ? world : 1);
  const auto in = [&](std::size_t s) { return static_cast<const unsigned char*>(ranks[s].in); };
  const auto stage = [&](std::size_t first, std::size_t bytes) {
    lanes.each_rank([&](const Lane& lane, std::size_t s) {
      if (!std::ranges::binary_search(moves.sources, s)) return;
      copy_rows_on(lane, staging.of(s), part, in(s) + first, moves.in_stride, bytes,
                   is_dealt ? world : 1);
    });
    lanes.meet();
    lanes.each_rank([&](const Lane& lane, std::size_t t) {
      if (!std::ranges::binary_search(moves.targets, t)) return;
      Movement work{};
      work.out[work.targets++] = static_cast<unsigned char*>(ranks[t].out) + first;
      std::size_t sources = 0;
      for (const std::size_t s : moves.sources) {
        const bool is_near = &lane == &lanes.of(Rank{s});
        work.in[sources++] = is_near ? in(s) + t * moves.in_stride + first
                                     : staging.of(s) + (is_dealt ? t * part : 0);
      }
      if (sources > 1) work.out_stride = moves.bytes;
      enqueue_move(lane, work, sources, bytes);
    });
    lanes.meet();
  };
  run_in_pieces(lanes, ranks, ticket, moves.bytes, part, stage);
}

template <std::size_t, CollectiveKind Kind, class T>
void enqueue_staged(const Collective<Kind, T>& call, const Lanes& lanes,
                    std::span<const Offer> ranks, std::uint64_t ticket) {
  enqueue_staged_moves(moves_of(call, ranks.size()), lanes, ranks, ticket);
}

}  // namespace lockstep::detail::threads
