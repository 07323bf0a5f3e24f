// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batch norms in device memory (`NormWork<DeviceMemory>`): one capturable launch per pass.
/// Elementwise passes start at the tensor's end, which the previous pass has left in the cache.

#include "lockstep/detail/device/cuda/memory.cuh"
#include "lockstep/detail/norm/channel_sums.cuh"

namespace lockstep::detail {

/// Sums of deviations, and of their squares, from each channel's first value, which is as far from
/// the mean as others are: in double, subtracting the mean later loses nothing. The few values that
/// a thread holds are summed in the elements' arithmetic as deviations from the first of them,
/// which is accurate even if the channel's first value is an outlier.
template <class T>
struct MomentTerm {
  using Element = T;
  using A = Accumulator<T>;
  static constexpr unsigned packets = 4;
  static constexpr unsigned column_packets = 8;
  static constexpr bool stores = false;
  struct Channel {
    double origin;
  };
  template <std::size_t N>
  using Loaded = Packet<T, N>;

  const T* x;

  __device__ Channel channel(std::size_t, std::size_t first) const {
    return {static_cast<double>(static_cast<A>(x[first]))};
  }
  template <std::size_t N>
  __device__ Loaded<N> load(std::size_t at, std::size_t) const {
    return load_packet<Caching::keep, N>(x + at);  // normalising reads it next
  }
  template <unsigned Count, class L, class Index>
  __device__ static void add(const Channel& channel, const L* loaded, const Index& where,
                             ChannelSums& sums) {
    const A first = static_cast<A>(loaded[where(0).packet].at[where(0).index]);
    A sum = 0;
    A squares = 0;
#pragma unroll
    for (unsigned k = 1; k < Count; ++k) {
      const Where at = where(k);
      const A deviation = static_cast<A>(loaded[at.packet].at[at.index]) - first;
      sum += deviation;
      squares = std::fma(deviation, deviation, squares);
    }
    const double delta = static_cast<double>(first) - channel.origin;
    const double all = Count * delta;
    sums.first += all + static_cast<double>(sum);
    sums.second += static_cast<double>(squares) + delta * (all + 2 * static_cast<double>(sum));
  }
};

/// The moments of `count` values from the sums of a `MomentTerm`.
__device__ inline Moments moments_of(double origin, const ChannelSums& sums, double count) {
  const double mean = sums.first / count;
  const double m2 = sums.second - mean * sums.first;
  return {origin + mean, m2 < 0 ? 0 : m2};  // NaN stays NaN
}

struct KeepPacket {
  static constexpr bool ends = false;
  double* packet;
  std::size_t channels;
  double count;

  template <class Channel>
  __device__ void operator()(std::size_t c, const Channel& channel, const ChannelSums& sums) const {
    const Moments moments = moments_of(channel.origin, sums, count);
    packet[c] = moments.mean;
    packet[channels + c] = moments.m2;
    if (c == 0) packet[2 * channels] = count;
  }
};

/// A layer's statistics from forward to backward, in device memory.
struct SavedMoments {
  SavedStatistics* channels;
  double* share;  // 1 / count of values over all ranks
};

template <class R>
struct FinalizeChannel {
  static constexpr bool ends = true;
  SavedMoments saved;
  BatchNormOptions options;
  NormRunning<R> running;
  double count;

  /// Do channels read the number of tracked batches? Then it is incremented after all of them.
  __device__ bool waits() const { return options.momentum < 0; }

  __device__ void finalize(std::size_t c, const Moments& moments, double values) const {
    using A = Accumulator<R>;
    // All loads first, so that they are in flight together.
    const auto mean = static_cast<double>(static_cast<A>(running.mean[c]));
    const auto variance = static_cast<double>(static_cast<A>(running.variance[c]));
    const double share = running_share(options.momentum, waits() ? *running.batches : 0);
    const auto update = [&](R& value, double before, double of_batch) {
      value = static_cast<R>(static_cast<A>(updated_running(before, of_batch, share)));
    };
    saved.channels[c] = {moments.mean, inverse_deviation(moments.m2 / values, options.eps)};
    if (c == 0) *saved.share = 1 / values;
    update(running.mean[c], mean, moments.mean);
    update(running.variance[c], variance, unbiased_variance(moments.m2, values));
  }
  template <class Channel>
  __device__ void operator()(std::size_t c, const Channel& channel, const ChannelSums& sums) const {
    finalize(c, moments_of(channel.origin, sums, count), count);
    if (c == 0 && !waits()) end();
  }
  __device__ void end() const { ++*running.batches; }
};

/// Loaded packets of a norm's tensors. Those that a pass does not load use no registers.
template <class T, std::size_t N>
struct NormPackets {
  Packet<T, N> x;
  Packet<T, N> y;  // or the residual
  Packet<T, N> dy;
};

/// Sums of the gradients that ReLU passes, and of their products with the deviations.
template <Fusion F, class T, class W>
struct GradientTerm {
  using Element = T;
  using A = Accumulator<T>;
  static constexpr unsigned packets = 2;
  static constexpr unsigned column_packets = 4;
  static constexpr bool stores = F == Fusion::add_relu;
  using Channel = ChannelNumbers<A>;
  template <std::size_t N>
  using Loaded = NormPackets<T, N>;

  const T* x;
  const T* y;
  const T* dy;
  T* dresidual;
  const SavedStatistics* saved;
  NormAffine<const W> affine;

  __device__ Channel channel(std::size_t c, std::size_t) const {
    return Channel(load_saved(saved + c), affine, c);
  }
  template <std::size_t N>
  __device__ Loaded<N> load(std::size_t at, std::size_t) const {
    Loaded<N> loaded;
    loaded.x = load_packet<Caching::keep, N>(x + at);
    loaded.dy = load_packet<Caching::keep, N>(dy + at);
    if constexpr (stores) loaded.y = load_packet<Caching::stream, N>(y + at);
    return loaded;
  }
  template <std::size_t N>
  __device__ void store(std::size_t at, const Loaded<N>& loaded) const {
    store_packet<Caching::keep>(dresidual + at, loaded.dy);
  }
  template <unsigned Count, class L, class Index>
  __device__ static void add(const Channel& channel, L* loaded, const Index& where,
                             ChannelSums& sums) {
    A sum = 0;
    A products = 0;
#pragma unroll
    for (unsigned k = 0; k < Count; ++k) {
      const Where at = where(k);
      L& own = loaded[at.packet];
      const A deviation = channel.mean.deviation(static_cast<A>(own.x.at[at.index]));
      A gradient = static_cast<A>(own.dy.at[at.index]);
      if constexpr (F == Fusion::relu) {
        if (is_stopped(static_cast<T>(channel.normalised(deviation)))) gradient = 0;
      }
      if constexpr (F == Fusion::add_relu) {
        if (is_stopped(own.y.at[at.index])) gradient = 0;
        own.dy.at[at.index] = static_cast<T>(gradient);
      }
      sum += gradient;
      products = std::fma(gradient, deviation, products);
    }
    sums.first += static_cast<double>(sum);
    sums.second += static_cast<double>(products);
  }
};

/// Writes the gradients of weight and bias that are not null.
template <class G>
__device__ void write_gradients(const NormAffine<G>& gradients, std::size_t c, double bias,
                                double weight) {
  using A = Accumulator<G>;
  if (gradients.bias != nullptr) gradients.bias[c] = static_cast<G>(static_cast<A>(bias));
  if (gradients.weight != nullptr) gradients.weight[c] = static_cast<G>(static_cast<A>(weight));
}

/// Stores the sums for `input_gradient`; writes weight and bias gradients from this rank's sums.
template <class G>
struct KeepGradients {
  static constexpr bool ends = false;
  double* sums;
  std::size_t channels;
  const SavedStatistics* saved;
  NormAffine<G> gradients;

  template <class Channel>
  __device__ void operator()(std::size_t c, const Channel&, const ChannelSums& total) const {
    sums[c] = total.first;
    sums[channels + c] = total.second;
    write_gradients(gradients, c, total.first, total.second * saved[c].inverse);
  }
};

/// y = normalised x, + residual, ReLU.
template <Fusion F, class T, class W>
struct NormaliseMap {
  using Element = T;
  using A = Accumulator<T>;
  static constexpr unsigned column_packets = 4;
  using Channel = ChannelNumbers<A>;
  template <std::size_t N>
  using Loaded = NormPackets<T, N>;

  const T* x;
  const T* residual;
  T* y;
  const SavedStatistics* saved;
  NormAffine<const W> affine;

  __device__ Channel channel(std::size_t c) const {
    return Channel(load_saved(saved + c), affine, c);
  }
  template <std::size_t N>
  __device__ Loaded<N> load(std::size_t at) const {
    Loaded<N> loaded;
    loaded.x = load_packet<Caching::stream, N>(x + at);
    if constexpr (F == Fusion::add_relu) loaded.y = load_packet<Caching::stream, N>(residual + at);
    return loaded;
  }
  template <std::size_t N>
  __device__ T value(const Channel& channel, const Loaded<N>& loaded, unsigned i) const {
    A value = channel.normalised(channel.mean.deviation(static_cast<A>(loaded.x.at[i])));
    if constexpr (F == Fusion::add_relu) value += static_cast<A>(loaded.y.at[i]);
    if constexpr (F != Fusion::none) value = value < 0 ? A{0} : value;  // NaN stays NaN
    return static_cast<T>(value);
  }
  template <std::size_t N>
  __device__ void store(std::size_t at, const Packet<T, N>& values) const {
    store_packet<Caching::keep>(y + at, values);  // the next layer reads it
  }
};

/// The `input_gradient` of `NormWork`, with two fused multiply-adds per value.
template <Fusion F, class T, class W>
struct InputGradientMap {
  static_assert(F != Fusion::add_relu, "the residual's gradient is g already");
  using Element = T;
  using A = Accumulator<T>;
  static constexpr unsigned column_packets = 4;
  struct Channel : ChannelNumbers<A> {
    A slope;
    A offset;
  };
  template <std::size_t N>
  using Loaded = NormPackets<T, N>;

  const T* x;
  const T* dy;
  T* dx;
  SavedMoments saved;
  const double* sums;
  std::size_t channels;
  NormAffine<const W> affine;

  __device__ Channel channel(std::size_t c) const {
    const SavedStatistics own = load_saved(saved.channels + c);
    const ChannelNumbers<A> numbers(own, affine, c);
    const double factor = -static_cast<double>(numbers.scale) * *saved.share;
    Channel channel;
    static_cast<ChannelNumbers<A>&>(channel) = numbers;
    channel.slope = static_cast<A>(factor * own.inverse * own.inverse * sums[channels + c]);
    channel.offset = static_cast<A>(factor * sums[c]);
    return channel;
  }
  template <std::size_t N>
  __device__ Loaded<N> load(std::size_t at) const {
    Loaded<N> loaded;
    loaded.x = load_packet<Caching::stream, N>(x + at);
    loaded.dy = load_packet<Caching::stream, N>(dy + at);
    return loaded;
  }
  template <std::size_t N>
  __device__ T value(const Channel& channel, const Loaded<N>& loaded, unsigned i) const {
    const A deviation = channel.mean.deviation(static_cast<A>(loaded.x.at[i]));
    A gradient = static_cast<A>(loaded.dy.at[i]);
    if constexpr (F == Fusion::relu) {
      if (is_stopped(static_cast<T>(channel.normalised(deviation)))) gradient = 0;
    }
    return static_cast<T>(
        std::fma(deviation, channel.slope, std::fma(gradient, channel.scale, channel.offset)));
  }
  template <std::size_t N>
  __device__ void store(std::size_t at, const Packet<T, N>& values) const {
    store_packet<Caching::keep>(dx + at, values);
  }
};

using MapShape = PassShape<256, 4>;

/// Channels with contiguous positions.
struct FlatChannels {
  FixedDivisor positions;
  FixedDivisor channels;
  bool whole;  // every packet lies in one channel
};

/// An elementwise pass in memory order. A packet may span channels.
template <class Map>
struct FlatPass {
  const Map& map;
  const FlatChannels& flat;

  template <std::size_t N>
  __device__ auto load(std::size_t at) const {
    return map.template load<N>(at);
  }
  template <std::size_t N>
  __device__ void finish(std::size_t at, const typename Map::template Loaded<N>& loaded) const {
    const std::size_t run = flat.positions.quotient(at);
    std::size_t left = (run + 1) * flat.positions.value - at;
    std::size_t c = run - flat.channels.quotient(run) * flat.channels.value;
    auto channel = map.channel(c);
    Packet<typename Map::Element, N> values;
#pragma unroll
    for (unsigned i = 0; i < N; ++i) {
      if (!flat.whole) {
        if (left == 0) {
          c = c + 1 == flat.channels.value ? 0 : c + 1;
          left = flat.positions.value;
          channel = map.channel(c);
        }
        --left;
      }
      values.at[i] = map.template value<N>(channel, loaded, i);
    }
    map.template store<N>(at, values);
  }
};

template <std::size_t N, class Map>
LOCKSTEP_KERNEL __launch_bounds__(MapShape::threads)
    map_runs(Map map, FlatChannels flat, std::size_t count) {
  const FlatPass<Map> pass{map, flat};
  pass_over_tile<MapShape, N>(pass, gridDim.x - 1 - blockIdx.x, count);
}

/// An elementwise pass over a matrix: threads hold the constants of their columns.
template <std::size_t N, class Map>
LOCKSTEP_KERNEL __launch_bounds__(channel_threads)
    map_columns(Map map, NormShape shape, ColumnTile tile) {
  constexpr unsigned packets = column_packets<N, Map>;
  const std::size_t column = (std::size_t{blockIdx.x} * tile.lanes() + tile.lane()) * N;
  if (column >= shape.channels) return;
  typename Map::Channel channels[N];
#pragma unroll
  for (unsigned j = 0; j < N; ++j) channels[j] = map.channel(column + j);
  const std::size_t rows = tile.rows();
  const std::size_t step = rows * packets;
  const std::size_t last = (shape.samples + step - 1) / step;
  const auto finish = [&](std::size_t at, const auto& loaded) {
    Packet<typename Map::Element, N> values;
#pragma unroll
    for (unsigned j = 0; j < N; ++j) values.at[j] = map.template value<N>(channels[j], loaded, j);
    map.template store<N>(at, values);
  };
  for (std::size_t k = blockIdx.y; k < last; k += gridDim.y) {
    const std::size_t row = (last - 1 - k) * step + tile.row();
    typename Map::template Loaded<N> loaded[packets];
#pragma unroll
    for (unsigned u = 0; u < packets; ++u) {
      const std::size_t sample = row + u * rows;
      if (sample < shape.samples)
        loaded[u] = map.template load<N>(sample * shape.channels + column);
    }
#pragma unroll
    for (unsigned u = 0; u < packets; ++u) {
      const std::size_t sample = row + u * rows;
      if (sample < shape.samples) finish(sample * shape.channels + column, loaded[u]);
    }
  }
}

/// Several blocks per multiprocessor, each with enough rows to amortise its columns' constants.
inline constexpr std::size_t most_map_blocks = 2112;

/// The shape must not be empty. **Host** does not block. **Stream** ordered on `stream`.
template <class Map>
void launch_map(const char* name, cudaStream_t stream, const NormShape& shape, bool aligned,
                const Map& map) {
  using T = typename Map::Element;
  if (shape.positions == 1) {
    with_packets<T>(shape.channels, aligned, [&]<std::size_t N>() {
      const ColumnTile tile = column_tile<N>(shape.channels, 32);
      const std::size_t wide = column_tiles<N>(shape.channels, tile);
      const std::size_t rows = (channel_threads >> tile.shift) * column_packets<N, Map>;
      const std::size_t high = parts_of(shape.samples, rows, wide, most_map_blocks);
      launch_kernel<map_columns<N, Map>>(
          name, stream, dim3(static_cast<unsigned>(wide), static_cast<unsigned>(high)),
          channel_threads, map, shape, tile);
    });
  } else {
    // A packet may span runs, so the run's length does not matter.
    with_packets<T>(0, aligned, [&]<std::size_t N>() {
      const std::size_t count = shape.size();
      const FlatChannels flat{FixedDivisor(shape.positions, count),
                              FixedDivisor(shape.channels, shape.samples * shape.channels),
                              shape.positions % N == 0};
      launch_kernel<map_runs<N, Map>>(name, stream,
                                      static_cast<unsigned>(tiles_of<MapShape, N>(count)),
                                      MapShape::threads, map, flat, count);
    });
  }
}

/// Merges the packets of all ranks, one thread per channel.
template <class R>
LOCKSTEP_KERNEL __launch_bounds__(channel_threads)
    finalize_packets(const double* packets, std::size_t world, std::size_t channels,
                     FinalizeChannel<R> finalize, BlockSums blocks) {
  const double count = count_of_packets(packets, world, channels);
  if (count == 0) {  // keep the running statistics
    if (blockIdx.x == 0 && threadIdx.x == 0) *finalize.saved.share = 0;
    return;
  }
  const std::size_t c = std::size_t{blockIdx.x} * channel_threads + threadIdx.x;
  if (c < channels) finalize.finalize(c, merged_packets(packets, world, channels, c), count);
  if (blocks.is_last(0, gridDim.x) && threadIdx.x == 0) finalize.end();
}

/// Uses the running statistics, one thread per channel. The batch has no share in them.
template <class R>
LOCKSTEP_KERNEL __launch_bounds__(channel_threads)
    keep_running(SavedMoments saved, std::size_t channels, double eps, NormRunning<R> running) {
  const std::size_t c = std::size_t{blockIdx.x} * channel_threads + threadIdx.x;
  if (c >= channels) return;
  using A = Accumulator<R>;
  const auto mean = static_cast<double>(static_cast<A>(running.mean[c]));
  const auto variance = static_cast<double>(static_cast<A>(running.variance[c]));
  saved.channels[c] = {mean, inverse_deviation(variance, eps)};
  if (c == 0) *saved.share = 0;
}

/// Are all arrays aligned to 16 bytes? Null is.
inline bool are_aligned(std::initializer_list<const void*> arrays) {
  for (const void* array : arrays) {
    if (reinterpret_cast<std::uintptr_t>(array) % 16 != 0) return false;
  }
  return true;
}

template <>
class NormWork<DeviceMemory> {
 public:
  NormWork() = default;

  /// **Host** blocks when it allocates: if the channels change or the world grows. Otherwise memory
  /// stays where it is, because captured steps refer to it.
  bool reserve(std::size_t channels, std::size_t world) {
    const bool is_new = channels != channels_;
    if (is_new) {
      channels_ = channels;
      saved_ = DeviceElements<SavedStatistics>(channels);
      share_ = DeviceElements<double>(1);
      sums_ = DeviceElements<double>(2 * channels);
      packet_ = DeviceElements<double>(packet_doubles(channels));
      block_sums_ = DeviceElements<ChannelSums>(most_block_sums(channels));
      arrived_ = DeviceElements<unsigned>(channels + 1);
    }
    const std::size_t packets = world == 1 ? 0 : world * packet_doubles(channels);
    if (packets <= gathered_.size()) return is_new;
    gathered_ = DeviceElements<double>(packets);
    return true;
  }

  std::span<double> own() { return packet_; }
  std::span<double> all(std::size_t world) {
    return {gathered_.data(), world * packet_doubles(channels_)};
  }
  std::span<double> sums() { return sums_; }

  template <class T>
  void measure(cudaStream_t stream, const NormShape& shape, const T* x) {
    if (shape.size() == 0) return zero_async(own().data(), own().size_bytes(), stream);
    sum<MomentTerm<SameElement<T>>>(
        "statistics of a batch norm", stream, shape, {x}, {x},
        KeepPacket{own().data(), channels_, static_cast<double>(shape.count())});
  }

  template <class R>
  void finalize(cudaStream_t stream, const NormShape&, std::size_t world,
                const BatchNormOptions& options, const NormRunning<R>& running, std::string_view) {
    launch_kernel<finalize_packets<SameElement<R>>>(
        "statistics of ranks", stream, blocks_for(channels_, channel_threads), channel_threads,
        static_cast<const double*>(all(world).data()), world, channels_,
        finalizer(options, running, 0), blocks());
  }

  template <class T, class R>
  void measure_alone(cudaStream_t stream, const NormShape& shape, const T* x,
                     const BatchNormOptions& options, const NormRunning<R>& running) {
    if (shape.size() == 0) return;
    sum<MomentTerm<SameElement<T>>>(
        "statistics of a batch norm", stream, shape, {x}, {x},
        finalizer(options, running, static_cast<double>(shape.count())));
  }

  template <class R>
  void finalize_from_running(cudaStream_t stream, const NormShape&, const BatchNormOptions& options,
                             const NormRunning<R>& running) {
    launch_kernel<keep_running<SameElement<R>>>(
        "running statistics", stream, blocks_for(channels_, channel_threads), channel_threads,
        saved(), channels_, options.eps, same(running));
  }

  template <Fusion Fused, class T, class W>
  void normalise(cudaStream_t stream, const NormShape& shape, const T* x,
                 const NormAffine<const W>& affine, const T* residual, T* y) {
    if (shape.size() == 0) return;
    launch_map("normalising", stream, shape, are_aligned({x, residual, y}),
               NormaliseMap<Fused, SameElement<T>, SameElement<W>>{x, residual, y, saved().channels,
                                                                   same(affine)});
  }

  template <Fusion Fused, class T, class W, class G>
  void reduce_backward(cudaStream_t stream, const NormShape& shape, const T* x, const T* y,
                       const T* dy, const NormAffine<const W>& affine,
                       const NormAffine<G>& gradients, T* dresidual) {
    if (shape.size() == 0) {
      zero_async(sums().data(), sums().size_bytes(), stream);
      zero_async(gradients.weight, channels_ * sizeof(G), stream);
      zero_async(gradients.bias, channels_ * sizeof(G), stream);
      return;
    }
    using Term = GradientTerm<Fused, SameElement<T>, SameElement<W>>;
    sum<Term>("sums of gradients", stream, shape, {x, y, dy, dresidual},
              {x, y, dy, dresidual, saved().channels, same(affine)},
              KeepGradients<SameElement<G>>{
                  sums().data(), channels_, saved().channels, {gradients.weight, gradients.bias}});
  }

  template <Fusion Fused, class T, class W>
  void input_gradient(cudaStream_t stream, const NormShape& shape, const T* x, const T* dy,
                      const NormAffine<const W>& affine, T* dx) {
    if (shape.size() == 0) return;
    launch_map("gradient of a batch norm", stream, shape, are_aligned({x, dy, dx}),
               InputGradientMap<Fused, SameElement<T>, SameElement<W>>{
                   x, dy, dx, saved(), sums().data(), channels_, same(affine)});
  }

 private:
  SavedMoments saved() const { return {saved_.data(), share_.data()}; }
  BlockSums blocks() const { return {block_sums_.data(), arrived_.data()}; }

  template <class Term, class Finish>
  void sum(const char* name, cudaStream_t stream, const NormShape& shape,
           std::initializer_list<const void*> arrays, const Term& term, const Finish& finish) {
    const bool aligned = are_aligned(arrays);
    if (shape.positions == 1) {
      launch_column_sums(name, stream, shape, aligned, term, blocks(), finish);
    } else {
      launch_run_sums(name, stream, shape, aligned, term, blocks(), finish);
    }
  }

  template <class R>
  static NormRunning<SameElement<R>> same(const NormRunning<R>& running) {
    return {running.mean, running.variance, running.batches};
  }
  template <class W>
  static NormAffine<const SameElement<W>> same(const NormAffine<const W>& affine) {
    return {affine.weight, affine.bias};
  }
  template <class R>
  FinalizeChannel<SameElement<R>> finalizer(const BatchNormOptions& options,
                                            const NormRunning<R>& running, double count) const {
    return {saved(), options, same(running), count};
  }

  std::size_t channels_ = 0;
  DeviceElements<SavedStatistics> saved_;
  DeviceElements<double> share_;
  DeviceElements<double> sums_;
  DeviceElements<double> packet_;
  DeviceElements<double> gathered_;
  DeviceElements<ChannelSums> block_sums_;
  DeviceElements<unsigned> arrived_;
};

}  // namespace lockstep::detail
