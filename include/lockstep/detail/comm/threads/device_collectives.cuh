// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Collectives on device memory among the ranks of one process, enqueued by the last rank.
///
/// With peer access, each GPU has one launch and nothing is staged: GPUs divide the elements of an
/// all-reduce, and push their own data in other collectives. Without it, streams copy their ranks'
/// data to pinned host memory in pieces, wait for each other, and read what they need. The same
/// kernel combines in the same order, bitwise equally. Nothing is allocated; all can be captured.

#include "lockstep/detail/comm/threads/comm_streams.cuh"

namespace lockstep::detail::threads {

/// The addresses of arrays, or-ed together, to decide the alignment of packets.
template <class T>
std::uintptr_t bits_of(const std::vector<T*>& pointers) {
  std::uintptr_t bits = 0;
  for (const T* pointer : pointers) bits |= reinterpret_cast<std::uintptr_t>(pointer);
  return bits;
}

/// The most blocks of a launch of `pieces`, each thread with `far` packets to or from other GPUs.
///
/// If all ranks are on one GPU, blocks fill it. Otherwise blocks mostly wait for links and would
/// keep the model's kernels off the multiprocessors, so there are only as many as saturate a link:
/// an all-reduce loads through half of it, 225 GB/s for NVLink 4, which at a latency of 1.4 us
/// needs 320 KiB in flight. Fewer than 16 blocks would not saturate the GPU's own memory.
inline std::size_t most_blocks(const CommStream& comm_stream, std::size_t far, std::size_t pieces) {
  if (comm_stream.is_only)
    return static_cast<std::size_t>(comm_stream.processors) * (2048 / PacketPass::threads);
  constexpr std::size_t in_flight = std::size_t{320} << 10;
  constexpr std::size_t of_block = std::size_t{16} * PacketPass::threads;
  const std::size_t wanted = in_flight / of_block / std::max<std::size_t>(far, 1);
  return std::max<std::size_t>(1, std::clamp<std::size_t>(wanted, 16, 32) / pieces);
}

/// Pieces of all ranks' memory that one stream combines, each into `targets` of the outs.
template <class T>
struct StreamCombination {
  std::vector<const T*> in;
  std::vector<T*> out;
  std::size_t count;  // elements per piece, and the stride between pieces
  std::size_t pieces = 1;
  std::size_t targets = 1;
};

template <std::size_t Ranks, class T, class Op>
void launch_combine(const CommStream& comm_stream, const StreamCombination<T>& what, const Op& op) {
  using E = SameElement<T>;
  using Values = RankPointers<E, Ranks>;
  if (what.count == 0) return;
  Combination<E, Values, Values::capacity> work{};
  std::copy(what.in.begin(), what.in.end(), work.values.at);
  std::copy(what.out.begin(), what.out.end(), work.out);
  work.pass = PacketPass::cut<T>(what.count, bits_of(what.in) | bits_of(what.out) |
                                                 (what.pieces > 1 ? what.count * sizeof(T) : 0));
  work.stride = what.count;
  work.targets = static_cast<unsigned>(what.targets);
  work.ranks = static_cast<unsigned>(what.in.size());
  const std::size_t most =
      most_blocks(comm_stream, what.in.size() - comm_stream.ranks, what.pieces);
  launch_kernel<combine<E, Op, Values, Values::capacity>>(
      "combine", comm_stream.stream, work.pass.template grid<T>(most, what.pieces),
      PacketPass::threads, work, op);
}

/// Unrolled for common numbers of ranks.
template <std::size_t Ranks, class T, class Op>
void enqueue_combine(const CommStream& comm_stream, const StreamCombination<T>& what,
                     const Op& op) {
  if constexpr (Ranks != dynamic && Ranks <= 16) {
    launch_combine<Ranks>(comm_stream, what, op);
  } else {
    switch (what.in.size()) {
      case 2:
        return launch_combine<2>(comm_stream, what, op);
      case 4:
        return launch_combine<4>(comm_stream, what, op);
      case 8:
        return launch_combine<8>(comm_stream, what, op);
      default:
        return launch_combine<dynamic>(comm_stream, what, op);
    }
  }
}

/// Moves `bytes` from each of `sources` to the targets, on one stream. Sets `work.pass`.
inline void enqueue_move(const CommStream& comm_stream, Movement& work, std::size_t sources,
                         std::size_t bytes) {
  if (bytes == 0 || work.targets == 0) return;
  std::uintptr_t bits = work.in_stride | work.out_stride;
  for (std::size_t s = 0; s < sources; ++s) bits |= reinterpret_cast<std::uintptr_t>(work.in[s]);
  for (std::size_t t = 0; t < work.targets; ++t)
    bits |= reinterpret_cast<std::uintptr_t>(work.out[t]);
  work.pass = PacketPass::cut<unsigned char>(bytes, bits);
  const dim3 blocks = work.pass.grid<unsigned char>(most_blocks(comm_stream, 1, sources), sources);
  if (work.in_stride == 0) {
    launch_kernel<move_bytes<false>>("move_bytes", comm_stream.stream, blocks, PacketPass::threads,
                                     work);
  } else {
    launch_kernel<move_bytes<true>>("move_bytes", comm_stream.stream, blocks, PacketPass::threads,
                                    work);
  }
}

/// Copies `rows` of `bytes` each, with the given pitches in bytes.
inline void copy_rows_on(const CommStream& comm_stream, unsigned char* to, std::size_t to_pitch,
                         const unsigned char* from, std::size_t from_pitch, std::size_t bytes,
                         std::size_t rows) {
  constexpr std::size_t most_pitch = 0x7fffffff;  // limit of every device
  if (rows > 1 && std::max(from_pitch, to_pitch) <= most_pitch) {
    check_cuda(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, bytes, rows, cudaMemcpyDefault,
                                 comm_stream.stream),
               "cudaMemcpy2DAsync");
    return;
  }
  for (std::size_t r = 0; r < rows; ++r)
    copy_async(to + r * to_pitch, from + r * from_pitch, bytes, comm_stream.stream);
}

/// Runs `stage(first, n)` on all `count` elements at once, or `most` at a time if staged.
template <class Stage>
void run_in_pieces(const CommStreams& comm_streams, std::span<const CallArguments> ranks,
                   std::uint64_t ticket, std::size_t count, std::size_t most, const Stage& stage) {
  if (!comm_streams.is_staged()) most = std::max<std::size_t>(count, 1);
  comm_streams.run(ranks, ticket, [&] {
    for (std::size_t first = 0; first < count; first += most)
      stage(first, std::min(most, count - first));
  });
}

/// Every rank's values from `first` on: in place or, without peer access, at `staged` of the slot.
template <class T>
std::vector<const T*> ins_of(const CommStreams& comm_streams, const CommStream& comm_stream,
                             std::span<const CallArguments> ranks, std::size_t first,
                             std::size_t staged) {
  std::vector<const T*> all;
  for (std::size_t w = 0; w < ranks.size(); ++w) {
    const bool is_near = !comm_streams.is_staged() || &comm_stream == &comm_streams.of(w);
    all.push_back(is_near ? static_cast<const T*>(ranks[w].in) + first
                          : comm_streams.slot<const T>(w) + staged);
  }
  return all;
}

/// Each communication stream combines its share of the elements and stores it to all ranks; without
/// peer access, to its own ranks and to the host, from where the others copy it.
template <std::size_t Ranks, class T, class Op>
void enqueue(const calls::AllReduce<T, Op>& call, const CommStreams& comm_streams,
             std::span<const CallArguments> ranks, std::uint64_t ticket) {
  const std::size_t shares = comm_streams.all().size();
  T* const result = comm_streams.slot<T>(ranks.size());
  const auto stage = [&](std::size_t first, std::size_t count) {
    const std::size_t packets = (count + packet_size<T> - 1) / packet_size<T>;
    const auto border = [&](const CommStream& comm_stream, std::size_t next) {
      const auto share = static_cast<std::size_t>(&comm_stream - comm_streams.all().data()) + next;
      return std::min(count, packets * share / shares * packet_size<T>);
    };
    // A communication stream's own share stays on its GPU.
    const auto copy_other_shares = [&](const CommStream& comm_stream, T* to, const T* from) {
      const std::size_t end = border(comm_stream, 1);
      copy_async(to, from, border(comm_stream, 0) * sizeof(T), comm_stream.stream);
      copy_async(to + end, from + end, (count - end) * sizeof(T), comm_stream.stream);
    };
    if (comm_streams.is_staged()) {
      comm_streams.each_rank([&](const CommStream& comm_stream, std::size_t w) {
        copy_other_shares(comm_stream, comm_streams.slot<T>(w),
                          static_cast<const T*>(ranks[w].in) + first);
      });
      comm_streams.barrier();
    }
    comm_streams.each([&](const CommStream& comm_stream) {
      const std::size_t begin = border(comm_stream, 0);
      std::vector<T*> outs;
      for (std::size_t w = 0; w < ranks.size(); ++w) {
        if (!comm_streams.is_staged() || &comm_stream == &comm_streams.of(w))
          outs.push_back(static_cast<T*>(ranks[w].out) + first + begin);
      }
      if (comm_streams.is_staged()) outs.push_back(result + begin);
      const std::size_t targets = outs.size();
      enqueue_combine<Ranks, T>(
          comm_stream,
          StreamCombination<T>{ins_of<T>(comm_streams, comm_stream, ranks, first + begin, begin),
                               std::move(outs), border(comm_stream, 1) - begin, 1, targets},
          call.op);
    });
    if (!comm_streams.is_staged()) return;
    comm_streams.barrier();
    comm_streams.each_rank([&](const CommStream& comm_stream, std::size_t w) {
      copy_other_shares(comm_stream, static_cast<T*>(ranks[w].out) + first, result);
    });
  };
  run_in_pieces(comm_streams, ranks, ticket, call.count, comm_streams.slot_bytes() / sizeof(T),
                stage);
}

/// A reduction whose results are each for one rank: the root, or all. That rank's communication
/// stream combines; on one GPU, one launch serves all. A host slot has a part for each such rank.
template <std::size_t Ranks, CollectiveKind Kind, class T, class Op>
void enqueue(const Collective<Kind, T, Op>& call, const CommStreams& comm_streams,
             std::span<const CallArguments> ranks, std::uint64_t ticket) {
  constexpr bool is_rooted = Kind == CollectiveKind::reduce;
  const std::size_t rows = is_rooted ? 1 : ranks.size();
  const std::size_t part = comm_streams.slot_bytes() / rows / sizeof(T);
  const std::size_t together = comm_streams.is_one() ? rows : 1;  // results per launch
  const auto stage = [&](std::size_t first, std::size_t count) {
    if (comm_streams.is_staged()) {
      comm_streams.each_rank([&](const CommStream& comm_stream, std::size_t w) {
        if (is_rooted && &comm_stream == &comm_streams.of(call.root.value())) return;
        copy_rows_on(
            comm_stream, comm_streams.slot<unsigned char>(w), part * sizeof(T),
            reinterpret_cast<const unsigned char*>(static_cast<const T*>(ranks[w].in) + first),
            call.count * sizeof(T), count * sizeof(T), rows);
      });
      comm_streams.barrier();
    }
    comm_streams.each_rank([&](const CommStream& comm_stream, std::size_t w) {
      if (is_rooted ? Rank{w} != call.root : w % together != 0) return;
      const std::size_t row = is_rooted ? 0 : w;
      std::vector<T*> outs;
      for (const CallArguments& rank : ranks.subspan(w, together))
        outs.push_back(static_cast<T*>(rank.out) + first);
      enqueue_combine<Ranks, T>(
          comm_stream,
          StreamCombination<T>{
              ins_of<T>(comm_streams, comm_stream, ranks, row * call.count + first, row * part),
              std::move(outs), count, together},
          call.op);
    });
    if (comm_streams.is_staged()) comm_streams.barrier();
  };
  run_in_pieces(comm_streams, ranks, ticket, call.count, part, stage);
}

/// The `bytes` at in[s] + t * in_stride go to out[t] + i * bytes, where source s is the i-th.
struct Moves {
  std::vector<std::size_t> sources;
  std::vector<std::size_t> targets;
  std::size_t bytes;
  std::size_t in_stride;  // 0 if all targets get the same
};

/// Each communication stream pushes its GPU's data; a single one does so in one launch.
inline void push_moves(const Moves& moves, const CommStreams& comm_streams,
                       std::span<const CallArguments> ranks) {
  comm_streams.each([&](const CommStream& comm_stream) {
    for (std::size_t i = 0; i < moves.sources.size(); ++i) {
      if (&comm_stream != &comm_streams.of(moves.sources[i])) continue;
      Movement work{};
      work.in_stride = moves.in_stride;
      for (const std::size_t t : moves.targets)
        work.out[work.targets++] = static_cast<unsigned char*>(ranks[t].out) + i * moves.bytes;
      const std::size_t n = comm_streams.is_one() ? moves.sources.size() : 1;
      for (std::size_t s = 0; s < n; ++s)
        work.in[s] = static_cast<const unsigned char*>(ranks[moves.sources[i + s]].in);
      if (n > 1) work.out_stride = moves.bytes;
      enqueue_move(comm_stream, work, n, moves.bytes);
      if (comm_streams.is_one()) return;
    }
  });
}

/// Copies through host slots, with a part for each dealt piece: `bytes` of each from `first` on.
inline void stage_moves(const Moves& moves, const CommStreams& comm_streams,
                        std::span<const CallArguments> ranks, std::size_t part, std::size_t first,
                        std::size_t bytes) {
  const bool is_dealt = moves.in_stride != 0;
  const auto in = [&](std::size_t s) {
    return static_cast<const unsigned char*>(ranks[s].in) + first;
  };
  comm_streams.each_rank([&](const CommStream& comm_stream, std::size_t s) {
    if (!std::ranges::binary_search(moves.sources, s)) return;
    copy_rows_on(comm_stream, comm_streams.slot<unsigned char>(s), part, in(s), moves.in_stride,
                 bytes, is_dealt ? ranks.size() : 1);
  });
  comm_streams.barrier();
  comm_streams.each_rank([&](const CommStream& comm_stream, std::size_t t) {
    if (!std::ranges::binary_search(moves.targets, t)) return;
    Movement work{};
    work.out[work.targets++] = static_cast<unsigned char*>(ranks[t].out) + first;
    std::size_t sources = 0;
    for (const std::size_t s : moves.sources) {
      work.in[sources++] = &comm_stream == &comm_streams.of(s)
                               ? in(s) + t * moves.in_stride
                               : comm_streams.slot<unsigned char>(s) + (is_dealt ? t * part : 0);
    }
    if (sources > 1) work.out_stride = moves.bytes;
    enqueue_move(comm_stream, work, sources, bytes);
  });
  comm_streams.barrier();
}

template <std::size_t, CollectiveKind Kind, class T>
void enqueue(const Collective<Kind, T>& call, const CommStreams& comm_streams,
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
  const std::size_t part = comm_streams.slot_bytes() / (C::deals_pieces ? ranks.size() : 1);
  run_in_pieces(comm_streams, ranks, ticket, bytes, part, [&](std::size_t first, std::size_t n) {
    if (!comm_streams.is_staged()) return push_moves(moves, comm_streams, ranks);
    stage_moves(moves, comm_streams, ranks, part, first, n);
  });
}

}  // namespace lockstep::detail::threads
