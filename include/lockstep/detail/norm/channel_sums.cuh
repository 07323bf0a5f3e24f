// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Two sums for every channel of a tensor in one launch, bitwise repeatable: each channel is
/// divided among blocks, and the last block to finish adds up the others' sums.

#include <cub/block/block_reduce.cuh>

#include "lockstep/detail/device/cuda/vector.cuh"
#include "lockstep/detail/norm/statistics.hpp"
#include "lockstep/detail/norm/work.hpp"

namespace lockstep::detail {

__device__ inline SavedStatistics load_saved(const SavedStatistics* saved) {
  const auto both = *reinterpret_cast<const double2*>(saved);
  return {both.x, both.y};
}

/// How a channel's values are normalised. Forward and backward call the same function with explicit
/// fma, so that backward recomputes the values that forward has rounded.
template <class A>
struct ChannelNumbers {
  SplitMean<A> mean;
  A scale;
  A shift;

  ChannelNumbers() = default;
  template <class W>
  __device__ ChannelNumbers(const SavedStatistics& saved, const NormAffine<const W>& affine,
                            std::size_t channel)
      : mean(saved.mean),
        scale(static_cast<A>(
            static_cast<double>(static_cast<Accumulator<W>>(affine.weight[channel])) *
            saved.inverse)),
        shift(static_cast<A>(static_cast<Accumulator<W>>(affine.bias[channel]))) {}

  __device__ A normalised(A deviation) const { return std::fma(deviation, scale, shift); }
};

/// A divisor used many times: a multiplication and a shift replace the division.
struct FixedDivisor {
  std::uint64_t value;
  std::uint64_t magic;   // 2^64 / value, rounded up; 0 if the quotients would not be exact
  std::uint32_t narrow;  // the same with 2^32: a 32-bit product is much cheaper

  /// For dividends up to `most` (Granlund, Montgomery: Division by Invariant Integers using
  /// Multiplication, 1994).
  FixedDivisor(std::uint64_t value, std::uint64_t most)
      : value(value == 0 ? 1 : value),
        magic(value > 1 && most <= ~std::uint64_t{0} / value ? ~std::uint64_t{0} / value + 1 : 0),
        narrow(value > 1 && most <= 0xffffffffu / value
                   ? static_cast<std::uint32_t>(0xffffffffu / value + 1)
                   : 0) {}

  __device__ std::uint64_t quotient(std::uint64_t number) const {
    if (narrow != 0) return (std::uint64_t{static_cast<std::uint32_t>(number)} * narrow) >> 32;
    if (magic == 0) return number / value;
#if defined(__CUDA_ARCH__)
    return __umul64hi(number, magic);
#else
    return static_cast<std::uint64_t>((static_cast<unsigned __int128>(number) * magic) >> 64);
#endif
  }
};

inline constexpr unsigned channel_threads = 256;

/// Blocks of a summing launch that are resident on an H200 (132 multiprocessors): four each, or two
/// if threads hold sums of several channels. Constants, so that sums are the same on every GPU.
inline constexpr std::size_t most_run_blocks = 528;
inline constexpr std::size_t most_column_blocks = 264;

using ChannelSums = TwoSums<double>;

/// Sums and counters of finished blocks, per tile and overall. Counters are zero between launches.
struct BlockSums {
  ChannelSums* sums;
  unsigned* arrived;

  /// Is this block the last of `blocks`, so that it sees the others' sums? All threads call it.
  __device__ bool is_last(std::size_t which, unsigned blocks) const {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {  // fences for the whole block, which synchronizes before and after
      __threadfence();
      last = atomicInc(arrived + which, blocks - 1) == blocks - 1;
      __threadfence();
    }
    __syncthreads();
    return last;
  }
};

__device__ inline ChannelSums load_sums(const ChannelSums* from) {
  const auto both = __ldcg(reinterpret_cast<const double2*>(from));
  return {both.x, both.y};
}

/// A Term is what is summed. `load<N>(at, sample)` loads packets; `add<Count>(channel, loaded,
/// where, sums)` adds Count of their elements, of one channel, the k-th at `where(k)`; `channel(c,
/// first)` is a thread's constants. A Term with `stores` writes packets back. Finish gets a
/// channel's sums, in one thread; if it `ends` and `waits()`, `finish.end()` follows all channels.
struct Where {
  unsigned packet;
  unsigned index;
};
template <std::size_t N>
__device__ auto all_packets() {
  return
      [](unsigned k) { return Where{static_cast<unsigned>(k / N), static_cast<unsigned>(k % N)}; };
}
__device__ inline auto one_packet(unsigned packet) {
  return [packet](unsigned k) { return Where{packet, k}; };
}

/// Packets that a thread loads at once: more if they are single elements or below 16 bytes.
template <std::size_t N, class Term>
inline constexpr unsigned run_packets = (N == 1 ? 4 : 1) * Term::packets;
template <std::size_t N, class Term>
inline constexpr unsigned column_packets =
    (N == 1 ? 4 : 16 / (N * sizeof(typename Term::Element))) * Term::column_packets;

/// Sums over channels with runs of positions. Grid x is the channel, grid y divides a channel.
template <std::size_t N, class Term, class Finish>
LOCKSTEP_KERNEL __launch_bounds__(channel_threads, 4)
    sum_runs(Term term, NormShape shape, FixedDivisor by_run, BlockSums blocks, Finish finish) {
  constexpr unsigned packets = run_packets<N, Term>;
  constexpr std::size_t tile = std::size_t{channel_threads} * packets;
  const std::size_t c = blockIdx.x;
  const std::size_t run = by_run.value;  // packets of a run
  const std::size_t count = shape.samples * run;
  const std::size_t stride = shape.channels * shape.positions;
  const std::size_t start = c * shape.positions;
  const auto channel = term.channel(c, start);
  ChannelSums sums{};
  for (std::size_t v = blockIdx.y * tile + threadIdx.x; v < count; v += gridDim.y * tile) {
    typename Term::template Loaded<N> loaded[packets];
    std::size_t at[packets];
    const auto load = [&](unsigned u) {
      const std::size_t packet = v + u * channel_threads;
      const std::size_t sample = by_run.quotient(packet);
      at[u] = start + sample * stride + (packet - sample * run) * N;
      loaded[u] = term.template load<N>(at[u], sample);
    };
    if (v + (packets - 1) * channel_threads < count) {
#pragma unroll
      for (unsigned u = 0; u < packets; ++u) load(u);
      term.template add<packets * N>(channel, loaded, all_packets<N>(), sums);
      if constexpr (Term::stores) {
#pragma unroll
        for (unsigned u = 0; u < packets; ++u) term.template store<N>(at[u], loaded[u]);
      }
    } else {
      const auto inside = [&](unsigned u) { return v + u * channel_threads < count; };
#pragma unroll
      for (unsigned u = 0; u < packets; ++u) {
        if (inside(u)) load(u);
      }
#pragma unroll
      for (unsigned u = 0; u < packets; ++u) {
        if (!inside(u)) continue;
        term.template add<N>(channel, loaded, one_packet(u), sums);
        if constexpr (Term::stores) term.template store<N>(at[u], loaded[u]);
      }
    }
  }
  using Reduce = cub::BlockReduce<ChannelSums, channel_threads>;
  __shared__ typename Reduce::TempStorage storage;
  ChannelSums total = Reduce(storage).Sum(sums);
  if (gridDim.y != 1) {
    if (threadIdx.x == 0) blocks.sums[c * gridDim.y + blockIdx.y] = total;
    if (!blocks.is_last(c, gridDim.y)) return;
    sums = {};
    for (unsigned k = threadIdx.x; k < gridDim.y; k += channel_threads)
      sums = sums + load_sums(blocks.sums + c * gridDim.y + k);
    total = Reduce(storage).Sum(sums);
  }
  if (threadIdx.x == 0) finish(c, channel, total);
  if constexpr (Finish::ends) {
    if (finish.waits() && blocks.is_last(gridDim.x, gridDim.x) && threadIdx.x == 0) finish.end();
  }
}

/// `lanes` threads, a power of two, read adjacent packets of a row; the next ones, the next row.
struct ColumnTile {
  unsigned shift;  // lanes = 2^shift

  __device__ unsigned lanes() const { return 1u << shift; }
  __device__ unsigned lane() const { return threadIdx.x & (lanes() - 1); }
  __device__ unsigned row() const { return threadIdx.x >> shift; }
  __device__ unsigned rows() const { return channel_threads >> shift; }
};

/// Adds up what threads with the same columns have stored, into the first row of threads. Called by
/// all threads of a block. (CUB needs the number of threads per column at compile time.)
template <std::size_t N, class Sums>
__device__ void sum_over_rows(Sums (&shared)[N][channel_threads], ColumnTile tile) {
  for (unsigned half = tile.rows() / 2; half != 0; half /= 2) {
    __syncthreads();
    if (tile.row() >= half) continue;
#pragma unroll
    for (unsigned j = 0; j < N; ++j) {
      shared[j][threadIdx.x] =
          shared[j][threadIdx.x] + shared[j][threadIdx.x + half * tile.lanes()];
    }
  }
}

/// Sums over channels that are columns: samples have one position. A thread sums as many columns as
/// a packet has. Grid x covers the columns, grid y divides the rows.
template <std::size_t N, class Term, class Finish>
LOCKSTEP_KERNEL __launch_bounds__(channel_threads, 2)
    sum_columns(Term term, NormShape shape, ColumnTile tile, BlockSums blocks, Finish finish) {
  constexpr unsigned packets = column_packets<N, Term>;
  __shared__ ChannelSums shared[N][channel_threads];
  const std::size_t first_column = std::size_t{blockIdx.x} * tile.lanes() * N;
  const std::size_t column = first_column + tile.lane() * N;
  const bool inside = column < shape.channels;
  const std::size_t rows = tile.rows();
  ChannelSums sums[N] = {};

  const auto add_threads = [&] {
#pragma unroll
    for (unsigned j = 0; j < N; ++j) shared[j][threadIdx.x] = sums[j];
    sum_over_rows(shared, tile);
    __syncthreads();
  };
  // Calls f(column, sums) in one thread per column of the tile.
  const auto for_each_column = [&](const auto& f) {
    for (unsigned k = threadIdx.x; k < tile.lanes() * N; k += channel_threads) {
      if (first_column + k < shape.channels) f(first_column + k, shared[k % N][k / N]);
    }
  };

  if (inside) {
    typename Term::Channel channels[N];
#pragma unroll
    for (unsigned j = 0; j < N; ++j) channels[j] = term.channel(column + j, column + j);
    const std::size_t step = rows * packets;
    for (std::size_t row = blockIdx.y * step + tile.row(); row < shape.samples;
         row += gridDim.y * step) {
      typename Term::template Loaded<N> loaded[packets];
      const auto at = [&](unsigned u) { return (row + u * rows) * shape.channels + column; };
      const auto is_row = [&](unsigned u) { return row + u * rows < shape.samples; };
      if (is_row(packets - 1)) {
#pragma unroll
        for (unsigned u = 0; u < packets; ++u)
          loaded[u] = term.template load<N>(at(u), row + u * rows);
#pragma unroll
        for (unsigned j = 0; j < N; ++j)
          term.template add<packets>(
              channels[j], loaded, [j](unsigned k) { return Where{k, j}; }, sums[j]);
        if constexpr (Term::stores) {
#pragma unroll
          for (unsigned u = 0; u < packets; ++u) term.template store<N>(at(u), loaded[u]);
        }
      } else {
#pragma unroll
        for (unsigned u = 0; u < packets; ++u) {
          if (is_row(u)) loaded[u] = term.template load<N>(at(u), row + u * rows);
        }
#pragma unroll
        for (unsigned u = 0; u < packets; ++u) {
          if (!is_row(u)) continue;
#pragma unroll
          for (unsigned j = 0; j < N; ++j)
            term.template add<1>(
                channels[j], loaded, [=](unsigned) { return Where{u, j}; }, sums[j]);
          if constexpr (Term::stores) term.template store<N>(at(u), loaded[u]);
        }
      }
    }
  }
  add_threads();
  if (gridDim.y != 1) {
    for_each_column([&](std::size_t c, const ChannelSums& total) {
      blocks.sums[blockIdx.y * shape.channels + c] = total;
    });
    if (!blocks.is_last(blockIdx.x, gridDim.y)) return;
#pragma unroll
    for (unsigned j = 0; j < N; ++j) sums[j] = {};
#pragma unroll 2
    for (unsigned k = tile.row(); inside && k < gridDim.y; k += tile.rows()) {
#pragma unroll
      for (unsigned j = 0; j < N; ++j)
        sums[j] = sums[j] + load_sums(blocks.sums + k * shape.channels + column + j);
    }
    add_threads();
  }
  for_each_column(
      [&](std::size_t c, const ChannelSums& total) { finish(c, term.channel(c, c), total); });
  if constexpr (Finish::ends) {
    if (finish.waits() && blocks.is_last(gridDim.x, gridDim.x) && threadIdx.x == 0) finish.end();
  }
}

/// A tile of at most `most` lanes, a power of two, for packets of N in rows of `channels`.
template <std::size_t N>
ColumnTile column_tile(std::size_t channels, unsigned most) {
  unsigned shift = 0;
  while ((1u << shift) != most && (std::size_t{N} << shift) < channels) ++shift;
  return {shift};
}
template <std::size_t N>
std::size_t column_tiles(std::size_t channels, ColumnTile tile) {
  const std::size_t columns = std::size_t{N} << tile.shift;
  return (channels + columns - 1) / columns;
}

/// Into how many parts of at least `least` to cut `amount`: `wide` tiles, at most `most` blocks.
inline std::size_t parts_of(std::size_t amount, std::size_t least, std::size_t wide,
                            std::size_t most) {
  const std::size_t wanted = std::max<std::size_t>(1, most / std::max<std::size_t>(1, wide));
  return std::min(
      {wanted, std::max<std::size_t>(1, (amount + least - 1) / least), std::size_t{65535}});
}

/// Columns that a thread sums: more would leave no registers for loads. Threads that share a row:
/// more would leave more block sums to the last blocks.
inline constexpr std::size_t summed_columns = 4;
inline constexpr unsigned summing_lanes = 16;

inline std::size_t most_block_sums(std::size_t channels) {
  constexpr std::size_t widest = summing_lanes * summed_columns;  // columns of a tile
  const std::size_t tiles = (channels + widest - 1) / widest;
  return std::max(
      most_run_blocks,
      channels * std::max<std::size_t>(1, most_column_blocks / std::max<std::size_t>(1, tiles)));
}

/// Calls f<N>() with the widest packets up to `Most` that divide `run`, or N = 1 if not `aligned`.
template <class T, std::size_t Most = 16, class F>
void with_packets(std::size_t run, bool aligned, const F& f) {
  constexpr std::size_t widest = std::min(Most, packet_size<T>);
  if (aligned && run % widest == 0) {
    f.template operator()<widest>();
  } else {
    f.template operator()<1>();
  }
}

/// Sums a Term over columns of a non-empty matrix. **Host** does not block. **Stream** on `stream`.
template <class Term, class Finish>
void launch_column_sums(const char* name, cudaStream_t stream, const NormShape& shape, bool aligned,
                        const Term& term, const BlockSums& blocks, const Finish& finish) {
  using T = typename Term::Element;
  with_packets<T, summed_columns>(shape.channels, aligned, [&]<std::size_t N>() {
    const ColumnTile tile = column_tile<N>(shape.channels, summing_lanes);
    const std::size_t wide = column_tiles<N>(shape.channels, tile);
    const std::size_t rows = (channel_threads >> tile.shift) * column_packets<N, Term>;
    const std::size_t high = parts_of(shape.samples, rows, wide, most_column_blocks);
    launch_kernel<sum_columns<N, Term, Finish>>(
        name, stream, dim3(static_cast<unsigned>(wide), static_cast<unsigned>(high)),
        channel_threads, term, shape, tile, blocks, finish);
  });
}

/// The same for channels with runs of positions.
template <class Term, class Finish>
void launch_run_sums(const char* name, cudaStream_t stream, const NormShape& shape, bool aligned,
                     const Term& term, const BlockSums& blocks, const Finish& finish) {
  with_packets<typename Term::Element>(shape.positions, aligned, [&]<std::size_t N>() {
    const std::size_t run = shape.positions / N;
    const std::size_t count = shape.samples * run;
    const std::size_t high = parts_of(count, std::size_t{channel_threads} * run_packets<N, Term>,
                                      shape.channels, most_run_blocks);
    launch_kernel<sum_runs<N, Term, Finish>>(
        name, stream, dim3(static_cast<unsigned>(shape.channels), static_cast<unsigned>(high)),
        channel_threads, term, shape, FixedDivisor(run, count), blocks, finish);
  });
}

}  // namespace lockstep::detail
