// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Collectives on device memory among the ranks of one process, enqueued by the last rank.
///
/// With peer access, each GPU has one launch, every byte is loaded once and nothing is staged: GPUs
/// divide the elements of an all-reduce, and push their own data in other collectives. Without it,
/// lanes copy their ranks' data to pinned host memory in pieces, wait for each other, and read what
/// they need. The same kernel combines in the same order: results are bitwise the same. Nothing is
/// allocated, and all of it can be captured.

#include <cuda_runtime_api.h>

#include "lockstep/comm/backends/threads/lanes.cuh"
#include "lockstep/comm/backends/threads/rendezvous.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/combine.cuh"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/runtime.cuh"

namespace lockstep::detail::threads {

/// The addresses of arrays, or-ed together, to decide the alignment of packets.
template <class T>
std::uintptr_t bits_of(const std::vector<T*>& pointers) {
  std::uintptr_t bits = 0;
  for (const T* pointer : pointers) bits |= reinterpret_cast<std::uintptr_t>(pointer);
  return bits;
}

/// The most blocks of a launch of `pieces`, whose threads each have `far` 16-byte packets in flight
/// to or from other GPUs.
///
/// If all ranks are on one GPU, blocks fill it. Otherwise blocks mostly wait for links and would
/// keep the model's kernels off the multiprocessors, so there are only as many as saturate a link:
/// an all-reduce loads through half of it, 225 GB/s for NVLink 4, which at a latency of 1.4 us
/// needs 320 KiB in flight. Fewer than 16 blocks would not saturate the GPU's own memory.
inline std::size_t most_blocks(const Lane& lane, std::size_t far, std::size_t pieces) {
  if (lane.is_only) return static_cast<std::size_t>(lane.processors) * (2048 / PacketPass::threads);
  constexpr std::size_t in_flight = std::size_t{320} << 10;
  constexpr std::size_t of_block = std::size_t{16} * PacketPass::threads;
  const std::size_t wanted = in_flight / of_block / std::max<std::size_t>(far, 1);
  return std::max<std::size_t>(1, std::clamp<std::size_t>(wanted, 16, 32) / pieces);
}

/// Pieces of all ranks' memory that one lane combines, each into `targets` of the outs.
template <class T>
struct LaneCombination {
  std::vector<const T*> in;
  std::vector<T*> out;
  std::size_t count;  // elements per piece, and the stride between pieces
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

/// Unrolled for common numbers of ranks.
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

/// Moves `bytes` from each of `sources` to the targets, on one lane. Sets `work.pass`.
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

inline void copy_on(const Lane& lane, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, lane.stream), "cudaMemcpyAsync");
}

/// Copies `rows` of `bytes` each, with the given pitches in bytes.
inline void copy_rows_on(const Lane& lane, unsigned char* to, std::size_t to_pitch,
                         const unsigned char* from, std::size_t from_pitch, std::size_t bytes,
                         std::size_t rows) {
  constexpr std::size_t most_pitch = 0x7fffffff;  // limit of every device
  if (rows > 1 && std::max(from_pitch, to_pitch) <= most_pitch) {
    check_cuda(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, bytes, rows, cudaMemcpyDefault,
                                 lane.stream),
               "cudaMemcpy2DAsync");
    return;
  }
  for (std::size_t r = 0; r < rows; ++r)
    copy_on(lane, to + r * to_pitch, from + r * from_pitch, bytes);
}

/// Runs `stage(first, n)` on all `count` elements at once, or `most` at a time if staged.
template <class Stage>
void run_in_pieces(const Lanes& lanes, std::span<const CallArguments> ranks, std::uint64_t ticket,
                   std::size_t count, std::size_t most, const Stage& stage) {
  if (!lanes.is_staged()) most = std::max<std::size_t>(count, 1);
  lanes.run(ranks, ticket, [&] {
    for (std::size_t first = 0; first < count; first += most)
      stage(first, std::min(most, count - first));
  });
}

/// Every rank's values from `first` on, as a lane reads them: in place, or, for other GPUs without
/// peer access, in the host slot at `staged` elements.
template <class T>
std::vector<const T*> ins_of(const Lanes& lanes, const Lane& lane,
                             std::span<const CallArguments> ranks, std::size_t first,
                             std::size_t staged) {
  std::vector<const T*> all;
  for (std::size_t w = 0; w < ranks.size(); ++w) {
    const bool is_near = !lanes.is_staged() || &lane == &lanes.of(w);
    all.push_back(is_near ? static_cast<const T*>(ranks[w].in) + first
                          : lanes.slot<const T>(w) + staged);
  }
  return all;
}

/// Each lane combines its share of the elements and stores it to all ranks; without peer access, to
/// its own ranks and to the host, from where the others copy it.
template <std::size_t Ranks, class T, class Op>
void enqueue(const calls::AllReduce<T, Op>& call, const Lanes& lanes,
             std::span<const CallArguments> ranks, std::uint64_t ticket) {
  const std::size_t shares = lanes.all().size();
  T* const result = lanes.slot<T>(ranks.size());
  const auto stage = [&](std::size_t first, std::size_t count) {
    const std::size_t packets = (count + packet_size<T> - 1) / packet_size<T>;
    const auto border = [&](const Lane& lane, std::size_t next) {
      const auto share = static_cast<std::size_t>(&lane - lanes.all().data()) + next;
      return std::min(count, packets * share / shares * packet_size<T>);
    };
    // A lane's own share stays on its GPU.
    const auto copy_other_shares = [&](const Lane& lane, T* to, const T* from) {
      const std::size_t end = border(lane, 1);
      copy_on(lane, to, from, border(lane, 0) * sizeof(T));
      copy_on(lane, to + end, from + end, (count - end) * sizeof(T));
    };
    if (lanes.is_staged()) {
      lanes.each_rank([&](const Lane& lane, std::size_t w) {
        copy_other_shares(lane, lanes.slot<T>(w), static_cast<const T*>(ranks[w].in) + first);
      });
      lanes.barrier();
    }
    lanes.each([&](const Lane& lane) {
      const std::size_t begin = border(lane, 0);
      std::vector<T*> outs;
      for (std::size_t w = 0; w < ranks.size(); ++w) {
        if (!lanes.is_staged() || &lane == &lanes.of(w))
          outs.push_back(static_cast<T*>(ranks[w].out) + first + begin);
      }
      if (lanes.is_staged()) outs.push_back(result + begin);
      const std::size_t targets = outs.size();
      enqueue_combine<Ranks, T>(
          lane,
          LaneCombination<T>{ins_of<T>(lanes, lane, ranks, first + begin, begin), std::move(outs),
                             border(lane, 1) - begin, 1, targets},
          call.op);
    });
    if (!lanes.is_staged()) return;
    lanes.barrier();
    lanes.each_rank([&](const Lane& lane, std::size_t w) {
      copy_other_shares(lane, static_cast<T*>(ranks[w].out) + first, result);
    });
  };
  run_in_pieces(lanes, ranks, ticket, call.count, lanes.slot_bytes() / sizeof(T), stage);
}

/// A reduction whose results are each for one rank: the root, or all. That rank's lane combines; if
/// all ranks are on one GPU, one launch serves all. A host slot has a part for each such rank.
template <std::size_t Ranks, CollectiveKind Kind, class T, class Op>
void enqueue(const Collective<Kind, T, Op>& call, const Lanes& lanes,
             std::span<const CallArguments> ranks, std::uint64_t ticket) {
  constexpr bool is_rooted = Kind == CollectiveKind::reduce;
  const std::size_t rows = is_rooted ? 1 : ranks.size();
  const std::size_t part = lanes.slot_bytes() / rows / sizeof(T);
  const std::size_t together = lanes.is_one() ? rows : 1;  // results per launch
  const auto stage = [&](std::size_t first, std::size_t count) {
    if (lanes.is_staged()) {
      lanes.each_rank([&](const Lane& lane, std::size_t w) {
        if (is_rooted && &lane == &lanes.of(call.root.value())) return;
        copy_rows_on(
            lane, lanes.slot<unsigned char>(w), part * sizeof(T),
            reinterpret_cast<const unsigned char*>(static_cast<const T*>(ranks[w].in) + first),
            call.count * sizeof(T), count * sizeof(T), rows);
      });
      lanes.barrier();
    }
    lanes.each_rank([&](const Lane& lane, std::size_t w) {
      if (is_rooted ? Rank{w} != call.root : w % together != 0) return;
      const std::size_t row = is_rooted ? 0 : w;
      std::vector<T*> outs;
      for (const CallArguments& rank : ranks.subspan(w, together))
        outs.push_back(static_cast<T*>(rank.out) + first);
      enqueue_combine<Ranks, T>(
          lane,
          LaneCombination<T>{ins_of<T>(lanes, lane, ranks, row * call.count + first, row * part),
                             std::move(outs), count, together},
          call.op);
    });
    if (lanes.is_staged()) lanes.barrier();
  };
  run_in_pieces(lanes, ranks, ticket, call.count, part, stage);
}

/// A call that only moves data from `sources` to `targets`: the `bytes` at in[s] + t * in_stride go
/// to out[t] + i * bytes, where source s is the i-th.
struct Moves {
  std::vector<std::size_t> sources;
  std::vector<std::size_t> targets;
  std::size_t bytes;
  std::size_t in_stride;  // 0 if all targets get the same
};

/// Each lane pushes its GPU's data; a single lane does so in one launch.
inline void push_moves(const Moves& moves, const Lanes& lanes,
                       std::span<const CallArguments> ranks) {
  lanes.each([&](const Lane& lane) {
    for (std::size_t i = 0; i < moves.sources.size(); ++i) {
      if (&lane != &lanes.of(moves.sources[i])) continue;
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

/// Copies sources to their host slots, from where targets on other GPUs read: `bytes` of each piece
/// from `first` on. A slot has a part for each dealt piece.
inline void stage_moves(const Moves& moves, const Lanes& lanes,
                        std::span<const CallArguments> ranks, std::size_t part, std::size_t first,
                        std::size_t bytes) {
  const bool is_dealt = moves.in_stride != 0;
  const auto in = [&](std::size_t s) {
    return static_cast<const unsigned char*>(ranks[s].in) + first;
  };
  lanes.each_rank([&](const Lane& lane, std::size_t s) {
    if (!std::ranges::binary_search(moves.sources, s)) return;
    copy_rows_on(lane, lanes.slot<unsigned char>(s), part, in(s), moves.in_stride, bytes,
                 is_dealt ? ranks.size() : 1);
  });
  lanes.barrier();
  lanes.each_rank([&](const Lane& lane, std::size_t t) {
    if (!std::ranges::binary_search(moves.targets, t)) return;
    Movement work{};
    work.out[work.targets++] = static_cast<unsigned char*>(ranks[t].out) + first;
    std::size_t sources = 0;
    for (const std::size_t s : moves.sources) {
      work.in[sources++] = &lane == &lanes.of(s)
                               ? in(s) + t * moves.in_stride
                               : lanes.slot<unsigned char>(s) + (is_dealt ? t * part : 0);
    }
    if (sources > 1) work.out_stride = moves.bytes;
    enqueue_move(lane, work, sources, bytes);
  });
  lanes.barrier();
}

template <std::size_t, CollectiveKind Kind, class T>
void enqueue(const Collective<Kind, T>& call, const Lanes& lanes,
             std::span<const CallArguments> ranks, std::uint64_t ticket) {
  using C = Collective<Kind, T>;
  const std::size_t bytes = call.count * sizeof(T);
  Moves moves{{}, {}, bytes, C::deals_pieces ? bytes : 0};
  for (std::size_t w = 0; w < ranks.size(); ++w) {
    const bool is_root = Rank{w} == call.root;
    if (C::collects_pieces || is_root) moves.sources.push_back(w);
    if (Kind == CollectiveKind::gather ? is_root : C::deals_pieces || !C::is_in_place || !is_root)
      moves.targets.push_back(w);
  }
  const std::size_t part = lanes.slot_bytes() / (C::deals_pieces ? ranks.size() : 1);
  run_in_pieces(lanes, ranks, ticket, bytes, part, [&](std::size_t first, std::size_t n) {
    if (!lanes.is_staged()) return push_moves(moves, lanes, ranks);
    stage_moves(moves, lanes, ranks, part, first, n);
  });
}

}  // namespace lockstep::detail::threads
