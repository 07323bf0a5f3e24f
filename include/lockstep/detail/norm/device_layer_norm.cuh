// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Layer norms in device memory (`LayerNormWork<DeviceMemory>`): forward is one launch,
/// backward two, all capturable. Threads that share a row hold it in registers, so it is read once.

#include "lockstep/detail/norm/device_norm.cuh"

namespace lockstep::detail {

/// Packets of a row that a thread holds. Rows too long for a block are read twice.
inline constexpr unsigned row_packets = 4;

/// The sums over the `lanes` neighbouring threads of a row, bitwise the same in each; all threads
/// of a block call it. `turn` alternates for consecutive rows, as a warp may be ahead of others.
__device__ inline ChannelSums sum_over_lanes(ChannelSums sums, unsigned lanes, unsigned turn = 0) {
  for (unsigned other = (lanes < 32 ? lanes : 32) / 2; other != 0; other /= 2) {
    sums = sums + ChannelSums{__shfl_xor_sync(0xffffffffu, sums.first, other),
                              __shfl_xor_sync(0xffffffffu, sums.second, other)};
  }
  if (lanes <= 32) return sums;
  __shared__ ChannelSums of_warps[2][channel_threads / 32];
  if (threadIdx.x % 32 == 0) of_warps[turn][threadIdx.x / 32] = sums;
  __syncthreads();
  const unsigned first = threadIdx.x / lanes * lanes / 32;
  sums = of_warps[turn][first];
  for (unsigned warp = 1; warp < lanes / 32; ++warp) sums = sums + of_warps[turn][first + warp];
  return sums;
}

/// Per-feature values of N neighbouring features, in loads of up to 16 bytes. They are reused by
/// all rows, so they go through the L1 cache and spare the L2 cache.
template <class A, std::size_t N, class W>
__device__ Packet<A, N> load_features(const W* from) {
  constexpr std::size_t most = 16 / sizeof(W);
  constexpr std::size_t piece = N < most ? N : most;  // nvcc warns of std::min on a device
  Packet<A, N> features;
#pragma unroll
  for (std::size_t i = 0; i < N; i += piece) {
    const auto* bits = reinterpret_cast<const BitsOf<piece * sizeof(W)>*>(from + i);
    const auto some = cuda::std::bit_cast<Packet<W, piece>>(*bits);
#pragma unroll
    for (std::size_t k = 0; k < piece; ++k)
      features.at[i + k] = static_cast<A>(static_cast<Accumulator<W>>(some.at[k]));
  }
  return features;
}

/// A thread's part of a row: every `lanes`-th packet.
template <std::size_t N>
struct RowPart {
  std::size_t row;
  std::size_t features;
  unsigned lanes;
  unsigned lane;
  bool inside;

  __device__ RowPart(ColumnTile tile, std::size_t rows, std::size_t features)
      : row(std::size_t{blockIdx.x} * tile.rows() + tile.row()),
        features(features),
        lanes(tile.lanes()),
        lane(tile.lane()),
        inside(row < rows) {}

  __device__ std::size_t packets() const { return inside ? features / N : 0; }
  __device__ bool is_held() const { return features / N <= std::size_t{row_packets} * lanes; }
  __device__ std::size_t at(std::size_t packet) const { return row * features + packet * N; }

  /// Are there `row_packets` packets for this thread from `packet` on?
  __device__ bool has_all(std::size_t packet) const {
    return packet + (row_packets - 1) * lanes < packets();
  }
  /// Calls f(u, packet) for the packets that a thread holds, from `packet` on.
  template <class F>
  __device__ void for_each(std::size_t packet, const F& f) const {
#pragma unroll
    for (unsigned u = 0; u < row_packets; ++u) {
      if (packet + u * lanes < packets()) f(u, packet + u * lanes);
    }
  }
  __device__ std::size_t stride() const { return std::size_t{row_packets} * lanes; }
};

/// y = (x - mean) * inverse deviation * weight + bias. Saves the statistics if `saved` is not null;
/// `share` is 1 / features.
template <std::size_t N, class T, class W>
LOCKSTEP_KERNEL __launch_bounds__(channel_threads)
    normalise_rows_of(const T* x, T* y, NormAffine<const W> affine, SavedStatistics* saved,
                      std::size_t rows, std::size_t features, double share, double eps,
                      ColumnTile tile) {
  using A = Accumulator<T>;
  const RowPart<N> part(tile, rows, features);
  const MomentTerm<T> term{x};
  Packet<T, N> loaded[row_packets];
  const auto load = [&](unsigned u, std::size_t packet) {
    loaded[u] = term.template load<N>(part.at(packet), 0);
  };
  ChannelSums sums{};
  double origin = 0;
  if (part.inside) {
    const auto channel = term.channel(0, part.at(0));
    origin = channel.origin;
    for (std::size_t packet = part.lane; packet < part.packets(); packet += part.stride()) {
      part.for_each(packet, load);
      if (part.has_all(packet)) {
        term.template add<row_packets * N>(channel, loaded, all_packets<N>(), sums);
        continue;
      }
      part.for_each(packet, [&](unsigned u, std::size_t) {
        term.template add<N>(channel, loaded, one_packet(u), sums);
      });
    }
  }
  sums = sum_over_lanes(sums, part.lanes);
  if (!part.inside) return;
  // Done for every row: no division in double, and the root in the elements' arithmetic.
  const double shift = sums.first * share;
  const double variance = (sums.second - shift * sums.first) * share;
  const double inverse = 1 / std::sqrt(static_cast<A>((variance < 0 ? 0 : variance) + eps));
  const double row_mean = origin + shift;
  if (saved != nullptr && part.lane == 0) saved[part.row] = {row_mean, inverse};
  const SplitMean<A> mean(row_mean);
  const A scale = static_cast<A>(inverse);
  for (std::size_t packet = part.lane; packet < part.packets(); packet += part.stride()) {
    if (!part.is_held()) part.for_each(packet, load);
    part.for_each(packet, [&](unsigned u, std::size_t own) {
      const Packet<A, N> weight = load_features<A, N>(affine.weight + own * N);
      const Packet<A, N> bias = load_features<A, N>(affine.bias + own * N);
      Packet<T, N> values;
#pragma unroll
      for (unsigned i = 0; i < N; ++i) {
        const A value = mean.deviation(static_cast<A>(loaded[u].at[i])) * scale;
        values.at[i] = static_cast<T>(std::fma(value, weight.at[i], bias.at[i]));
      }
      store_packet<Caching::keep>(y + part.at(own), values);
    });
  }
}

/// The input's gradient (see `LayerNormWork::backward`) for rows too long for `gradients_of_rows`.
template <std::size_t N, class T, class W>
LOCKSTEP_KERNEL __launch_bounds__(channel_threads)
    gradient_of_rows(const T* x, const T* dy, T* dx, const W* weights, const SavedStatistics* saved,
                     std::size_t rows, std::size_t features, ColumnTile tile) {
  using A = Accumulator<T>;
  const RowPart<N> part(tile, rows, features);
  NormPackets<T, N> loaded[row_packets];
  const auto load = [&](unsigned u, std::size_t packet) {
    loaded[u].x = load_packet<Caching::stream, N>(x + part.at(packet));
    loaded[u].dy = load_packet<Caching::stream, N>(dy + part.at(packet));
  };
  // Calls f(i, g, deviation) for the elements of a packet.
  const auto for_each_element = [&](unsigned u, std::size_t packet, const SplitMean<A>& mean,
                                    const auto& f) {
    const Packet<A, N> weight = load_features<A, N>(weights + packet * N);
#pragma unroll
    for (unsigned i = 0; i < N; ++i) {
      f(i, static_cast<A>(loaded[u].dy.at[i]) * weight.at[i],
        mean.deviation(static_cast<A>(loaded[u].x.at[i])));
    }
  };
  const SavedStatistics own = part.inside ? load_saved(saved + part.row) : SavedStatistics{0, 0};
  const SplitMean<A> mean(own.mean);
  ChannelSums sums{};
  for (std::size_t packet = part.lane; packet < part.packets(); packet += part.stride()) {
    part.for_each(packet, load);
    A sum = 0;
    A products = 0;
    part.for_each(packet, [&](unsigned u, std::size_t at) {
      for_each_element(u, at, mean, [&](unsigned, A g, A deviation) {
        sum += g;
        products = std::fma(g, deviation, products);
      });
    });
    sums = sums + ChannelSums{static_cast<double>(sum), static_cast<double>(products)};
  }
  sums = sum_over_lanes(sums, part.lanes);
  if (!part.inside) return;
  const double share = 1 / static_cast<double>(features);
  const A offset = static_cast<A>(sums.first * share);
  const A slope = static_cast<A>(sums.second * share * own.inverse * own.inverse);
  const A scale = static_cast<A>(own.inverse);
  for (std::size_t packet = part.lane; packet < part.packets(); packet += part.stride()) {
    if (!part.is_held()) part.for_each(packet, load);
    part.for_each(packet, [&](unsigned u, std::size_t at) {
      Packet<T, N> values;
      for_each_element(u, at, mean, [&](unsigned i, A g, A deviation) {
        values.at[i] = static_cast<T>(((g - offset) - deviation * slope) * scale);
      });
      store_packet<Caching::keep>(dx + part.at(at), values);
    });
  }
}

/// Sums over rows of dy and of dy * normalised x, for the gradients of bias and weight.
template <class T>
struct RowGradientTerm {
  using Element = T;
  using A = Accumulator<T>;
  static constexpr unsigned column_packets = 4;
  static constexpr bool stores = false;
  struct Channel {};
  template <std::size_t N>
  struct Loaded : NormPackets<T, N> {
    SavedStatistics row;
  };

  const T* x;
  const T* dy;
  const SavedStatistics* saved;

  __device__ Channel channel(std::size_t, std::size_t) const { return {}; }
  template <std::size_t N>
  __device__ Loaded<N> load(std::size_t at, std::size_t row) const {
    Loaded<N> loaded;
    loaded.x = load_packet<Caching::keep, N>(x + at);
    loaded.dy = load_packet<Caching::keep, N>(dy + at);
    loaded.row = load_saved(saved + row);
    return loaded;
  }
  template <unsigned Count, class L, class Index>
  __device__ static void add(const Channel&, const L* loaded, const Index& where,
                             ChannelSums& sums) {
    A sum = 0;
    A products = 0;
#pragma unroll
    for (unsigned k = 0; k < Count; ++k) {
      const Where at = where(k);
      const L& own = loaded[at.packet];
      const SplitMean<A> mean(own.row.mean);
      const A gradient = static_cast<A>(own.dy.at[at.index]);
      const A deviation = mean.deviation(static_cast<A>(own.x.at[at.index]));
      sum += gradient;
      products = std::fma(gradient, deviation * static_cast<A>(own.row.inverse), products);
    }
    sums.first += static_cast<double>(sum);
    sums.second += static_cast<double>(products);
  }
};

template <class G>
struct WriteGradients {
  static constexpr bool ends = false;
  NormAffine<G> gradients;

  template <class Channel>
  __device__ void operator()(std::size_t c, const Channel&, const ChannelSums& total) const {
    write_gradients(gradients, c, total.first, total.second);
  }
};

/// The tile for rows of so many packets.
inline ColumnTile row_tile(std::size_t packets) {
  unsigned shift = 0;
  while (shift != 8 && (std::size_t{row_packets} << shift) < packets) ++shift;
  return {shift};
}

inline unsigned row_blocks(std::size_t rows, ColumnTile tile) {
  return blocks_for(rows, channel_threads >> tile.shift);
}

/// Columns per thread, each with two sums in registers.
inline constexpr unsigned row_columns = 16;
/// Blocks that are resident on an H200. A constant, so that sums are the same on every GPU.
inline constexpr unsigned most_row_blocks = 264;
/// Rows that a thread sums in the elements' arithmetic before it adds to the block's sums.
inline constexpr unsigned rows_of_sums = 64;

/// The tile for rows of so many packets of N.
template <std::size_t N>
ColumnTile held_tile(std::size_t packets) {
  unsigned shift = 0;
  while (shift != 8 && (std::size_t{row_columns / N} << shift) < packets) ++shift;
  return {shift};
}
inline bool is_held_row(std::size_t features) { return features <= channel_threads * row_columns; }

/// A block's sums for a column: for the bias and for the weight.
template <class T>
using ColumnSums = TwoSums<Accumulator<T>>;

template <class T>
std::size_t row_sum_bytes(std::size_t features) {
  return most_row_blocks * features * sizeof(ColumnSums<T>);
}

/// A thread's part of a row. Elements outside of the matrix are zero and add nothing to the sums.
template <std::size_t N, class T>
struct HeldRow {
  static constexpr unsigned packets = row_columns / N;
  /// Are there registers for the next row too?
  static constexpr bool loads_ahead = row_columns * sizeof(T) <= 32 && N != 1;
  Packet<T, N> x[packets];
  Packet<T, N> dy[packets];
  SavedStatistics numbers;
};

/// Normalises values of a row in two instructions.
template <class A>
struct RowNumbers {
  A mean;
  A scale;
  A shift;  // the low part of the mean, scaled

  __device__ explicit RowNumbers(const SavedStatistics& saved) {
    const SplitMean<A> split(saved.mean);
    mean = split.high;
    scale = static_cast<A>(saved.inverse);
    shift = -split.low * scale;
  }
  __device__ A normalised(A value) const { return std::fma(value - mean, scale, shift); }
};

template <std::size_t N>
struct HeldColumns {
  std::size_t features;
  ColumnTile tile;

  __device__ std::size_t at(unsigned u) const {
    return (std::size_t{u} * tile.lanes() + tile.lane()) * N;
  }
  __device__ bool has(unsigned u) const { return at(u) < features; }
};

/// With n = normalised x and g = dy * weight: dx = (g - mean(g) - n * mean(g * n)) * inverse.
/// Blocks take row after row and threads the same columns of each, so that x and dy are read once
/// and the sums of dy and dy * n stay in registers before they go to `block_sums`. dx may be dy.
template <std::size_t N, class T, class W>
LOCKSTEP_KERNEL __launch_bounds__(channel_threads, sizeof(Accumulator<T>) == 8 || N == 1 ? 1 : 2)
    gradients_of_rows(const T* x, const T* dy, T* dx, const W* weights,
                      const SavedStatistics* saved, ColumnSums<T>* block_sums, std::size_t rows,
                      std::size_t features, ColumnTile tile) {
  using A = Accumulator<T>;
  using Held = HeldRow<N, T>;
  const HeldColumns<N> columns{features, tile};
  const auto load = [&](std::size_t row) {
    Held held;
    const bool inside = row < rows;
#pragma unroll
    for (unsigned u = 0; u < Held::packets; ++u) {
      held.x[u] = {};
      held.dy[u] = {};
      if (!inside || !columns.has(u)) continue;
      const std::size_t at = row * features + columns.at(u);
      held.x[u] = load_packet<Caching::stream, N>(x + at);
      held.dy[u] = load_packet<Caching::stream, N>(dy + at);
    }
    held.numbers = inside ? load_saved(saved + row) : SavedStatistics{0, 0};
    return held;
  };
  // Calls f(i, dy, g, n) for the elements of a packet.
  const auto for_each = [&](const Held& held, const RowNumbers<A>& numbers, unsigned u,
                            const auto& f) {
    Packet<A, N> weight{};
    if (columns.has(u)) weight = load_features<A, N>(weights + columns.at(u));
#pragma unroll
    for (unsigned i = 0; i < N; ++i) {
      const A gradient = static_cast<A>(held.dy[u].at[i]);
      f(i, gradient, gradient * weight.at[i], numbers.normalised(static_cast<A>(held.x[u].at[i])));
    }
  };

  ColumnSums<T> column_sums[row_columns] = {};
  const auto hand_on = [&](bool again) {
    __shared__ ColumnSums<T> shared[N][channel_threads];
#pragma unroll
    for (unsigned u = 0; u < Held::packets; ++u) {
#pragma unroll
      for (unsigned i = 0; i < N; ++i) {
        shared[i][threadIdx.x] = column_sums[u * N + i];
        column_sums[u * N + i] = {};
      }
      sum_over_rows(shared, tile);
      if (tile.row() == 0 && columns.has(u)) {
#pragma unroll
        for (unsigned i = 0; i < N; ++i) {
          ColumnSums<T>& total = block_sums[blockIdx.x * features + columns.at(u) + i];
          const ColumnSums<T> own = shared[i][threadIdx.x];
          total = again ? total + own : own;
        }
      }
      __syncthreads();
    }
  };

  const double share = 1 / static_cast<double>(features);
  const std::size_t step = std::size_t{gridDim.x} * tile.rows();
  unsigned taken = 0;
  bool again = false;
  std::size_t row = std::size_t{blockIdx.x} * tile.rows() + tile.row();
  Held next;
  if constexpr (Held::loads_ahead) next = load(row);
  for (; row - tile.row() < rows; row += step) {
    const Held held = Held::loads_ahead ? next : load(row);
    if constexpr (Held::loads_ahead) next = load(row + step);
    const RowNumbers<A> numbers(held.numbers);
    A sum = 0;
    A products = 0;
#pragma unroll
    for (unsigned u = 0; u < Held::packets; ++u) {
      for_each(held, numbers, u, [&](unsigned i, A gradient, A g, A normalised) {
        sum += g;
        products = std::fma(g, normalised, products);
        ColumnSums<T>& own = column_sums[u * N + i];
        own.first += gradient;
        own.second = std::fma(gradient, normalised, own.second);
      });
    }
    const ChannelSums sums = sum_over_lanes(
        {static_cast<double>(sum), static_cast<double>(products)}, tile.lanes(), taken % 2);
    const double factor = -held.numbers.inverse * share;
    const A offset = static_cast<A>(sums.first * factor);
    const A slope = static_cast<A>(sums.second * factor);
#pragma unroll
    for (unsigned u = 0; u < Held::packets; ++u) {
      if (row >= rows || !columns.has(u)) continue;
      Packet<T, N> values;
      for_each(held, numbers, u, [&](unsigned i, A, A g, A normalised) {
        values.at[i] =
            static_cast<T>(std::fma(g, numbers.scale, std::fma(normalised, slope, offset)));
      });
      store_packet<Caching::keep>(dx + row * features + columns.at(u), values);
    }
    const bool is_last = row - tile.row() + step >= rows;
    if (++taken % rows_of_sums == 0 || is_last) {
      hand_on(again);
      again = true;
    }
  }
}

/// Columns per block of `add_row_blocks`.
inline constexpr ColumnTile added_columns{3};
inline unsigned column_blocks(std::size_t features) {
  return blocks_for(features, 1u << added_columns.shift);
}

template <class T, class G>
LOCKSTEP_KERNEL __launch_bounds__(channel_threads)
    add_row_blocks(const ColumnSums<T>* block_sums, unsigned blocks, std::size_t features,
                   WriteGradients<G> write) {
  const ColumnTile tile = added_columns;
  __shared__ ChannelSums shared[1][channel_threads];
  const std::size_t c = std::size_t{blockIdx.x} * tile.lanes() + tile.lane();
  ChannelSums sums{};
  if (c < features) {
#pragma unroll 4
    for (unsigned k = tile.row(); k < blocks; k += tile.rows()) {
      const auto own = load_packet<Caching::stream, 1>(block_sums + k * features + c).at[0];
      sums = sums + ChannelSums{static_cast<double>(own.first), static_cast<double>(own.second)};
    }
  }
  shared[0][threadIdx.x] = sums;
  sum_over_rows(shared, tile);
  if (tile.row() == 0 && c < features) write(c, 0, shared[0][threadIdx.x]);
}

template <>
class LayerNormWork<DeviceMemory> {
 public:
  LayerNormWork() = default;

  /// **Host** blocks when it allocates: if there are more rows than ever, or the features change.
  template <bool Keeps, class T, class W>
  void forward(cudaStream_t stream, std::size_t rows, std::size_t features, double eps, const T* x,
               const NormAffine<const W>& affine, T* y) {
    if constexpr (Keeps) reserve(rows, features, row_sum_bytes<T>(features));
    if (rows * features == 0) return;
    using Value = SameElement<T>;
    using Weight = SameElement<W>;
    with_packets<Value>(
        features, are_aligned({x, y, affine.weight, affine.bias}), [&]<std::size_t N>() {
          const ColumnTile tile = row_tile(features / N);
          launch_kernel<normalise_rows_of<N, Value, Weight>>(
              "layer norm", stream, row_blocks(rows, tile), channel_threads,
              static_cast<const Value*>(x), static_cast<Value*>(y),
              NormAffine<const Weight>{affine.weight, affine.bias}, Keeps ? saved() : nullptr, rows,
              features, 1 / static_cast<double>(features), eps, tile);
        });
  }

  template <class T, class W, class G>
  void backward(cudaStream_t stream, std::size_t rows, std::size_t features, const T* x,
                const T* dy, const NormAffine<const W>& affine, const NormAffine<G>& gradients,
                T* dx) {
    if (rows * features == 0) {
      zero_async(gradients.weight, features * sizeof(G), stream);
      zero_async(gradients.bias, features * sizeof(G), stream);
      return;
    }
    using Value = SameElement<T>;
    using Weight = SameElement<W>;
    const WriteGradients<SameElement<G>> write{{gradients.weight, gradients.bias}};
    const bool aligned = are_aligned({x, dy, dx, affine.weight});
    if (is_held_row(features)) {
      unsigned of_rows = 0;
      with_packets<Value>(features, aligned, [&]<std::size_t N>() {
        const ColumnTile tile = held_tile<N>(features / N);
        of_rows = std::min(row_blocks(rows, tile), most_row_blocks);
        launch_kernel<gradients_of_rows<N, Value, Weight>>(
            "gradients of a layer norm", stream, of_rows, channel_threads,
            static_cast<const Value*>(x), static_cast<const Value*>(dy), static_cast<Value*>(dx),
            static_cast<const Weight*>(affine.weight), static_cast<const SavedStatistics*>(saved()),
            column_sums<Value>(), rows, features, tile);
      });
      launch_kernel<add_row_blocks<Value, SameElement<G>>>(
          "gradients of a layer norm's weights", stream, column_blocks(features), channel_threads,
          static_cast<const ColumnSums<Value>*>(column_sums<Value>()), of_rows, features, write);
      return;
    }
    // Before dx is written, which may be dy.
    launch_column_sums("gradients of a layer norm's weights", stream, NormShape{rows, features, 1},
                       are_aligned({x, dy}), RowGradientTerm<Value>{x, dy, saved()}, blocks(),
                       write);
    with_packets<Value>(features, aligned, [&]<std::size_t N>() {
      const ColumnTile tile = row_tile(features / N);
      launch_kernel<gradient_of_rows<N, Value, Weight>>(
          "gradient of a layer norm", stream, row_blocks(rows, tile), channel_threads,
          static_cast<const Value*>(x), static_cast<const Value*>(dy), static_cast<Value*>(dx),
          static_cast<const Weight*>(affine.weight), static_cast<const SavedStatistics*>(saved()),
          rows, features, tile);
    });
  }

 private:
  /// Captured steps refer to the memory of statistics, so old arrays stay.
  void reserve(std::size_t rows, std::size_t features, std::size_t row_sums) {
    if (rows > rows_) {
      rows_ = std::max(rows, 2 * rows_);
      saved_.emplace_back(rows_);
    }
    const std::size_t sums =
        is_held_row(features) ? row_sums : most_block_sums(features) * sizeof(ChannelSums);
    if (features != features_ || sums > block_sums_.bytes()) {
      block_sums_ = DeviceArena(sums);
      arrived_ = DeviceElements<unsigned>(features + 1);
      features_ = features;
    }
  }

  SavedStatistics* saved() const { return saved_.back().data(); }
  template <class T>
  ColumnSums<T>* column_sums() const {
    return reinterpret_cast<ColumnSums<T>*>(block_sums_.data());
  }
  BlockSums blocks() const {
    return {reinterpret_cast<ChannelSums*>(block_sums_.data()), arrived_.data()};
  }

  std::size_t rows_ = 0;
  std::size_t features_ = 0;
  std::vector<DeviceElements<SavedStatistics>> saved_;  // the last one is the largest
  DeviceArena block_sums_{0};
  DeviceElements<unsigned> arrived_;
};

}  // namespace lockstep::detail
