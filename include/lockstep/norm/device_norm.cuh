// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batch norms in a GPU's memory: what `NormWork` describes. A pass is one launch, and all of
/// them may be part of a captured step.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/runtime.cuh"
#include "lockstep/norm/batch_norm_kernels.cuh"
#include "lockstep/norm/channel_sums.cuh"
#include "lockstep/norm/statistics.hpp"
#include "lockstep/norm/work.hpp"

namespace lockstep::detail {

/// Merges the packets of all ranks, a thread for each channel.
template <class R>
LOCKSTEP_KERNEL __launch_bounds__(channel_threads)
    settle_packets(const double* packets, std::size_t world, std::size_t channels,
                   SettleChannel<R> settle, BlockSums blocks) {
  const double count = count_of_packets(packets, world, channels);
  if (count == 0) {  // nothing changes
    if (blockIdx.x == 0 && threadIdx.x == 0) *settle.kept.share = 0;
    return;
  }
  const std::size_t c = std::size_t{blockIdx.x} * channel_threads + threadIdx.x;
  if (c < channels) settle.settle(c, merged_packets(packets, world, channels, c), count);
  if (blocks.is_last(0, gridDim.x) && threadIdx.x == 0) settle.end();
}

/// Keeps the running statistics, a thread for each channel. They do not depend on the batch: it has
/// no share in them.
template <class R>
LOCKSTEP_KERNEL __launch_bounds__(channel_threads)
    keep_running(KeptMoments kept, std::size_t channels, double eps, NormRunning<R> running) {
  const std::size_t c = std::size_t{blockIdx.x} * channel_threads + threadIdx.x;
  if (c >= channels) return;
  using A = Accumulator<R>;
  const auto mean = static_cast<double>(static_cast<A>(running.mean[c]));
  const auto variance = static_cast<double>(static_cast<A>(running.variance[c]));
  kept.channels[c] = {mean, inverse_deviation(variance, eps)};
  if (c == 0) *kept.share = 0;
}

/// Do all arrays begin where packets may? Null does.
inline bool are_aligned(std::initializer_list<const void*> arrays) {
  for (const void* array : arrays) {
    if (reinterpret_cast<std::uintptr_t>(array) % 16 != 0) return false;
  }
  return true;
}

inline void zero_device(cudaStream_t stream, void* data, std::size_t bytes) {
  if (data == nullptr || bytes == 0) return;
  check_cuda(cudaMemsetAsync(data, 0, bytes, stream), "cudaMemsetAsync");
}

inline unsigned channel_blocks(std::size_t channels) {
  return static_cast<unsigned>((channels + channel_threads - 1) / channel_threads);
}

template <>
class NormWork<DeviceMemory> {
 public:
  NormWork() = default;

  /// **Host** blocks where there is not enough room: in the first forward pass. What is there
  /// stays where it is, because captured steps know of it.
  bool reserve(std::size_t channels, std::size_t world) {
    const bool is_new = channels != channels_;
    if (is_new) {
      channels_ = channels;
      Places places;
      kept_ = places.take<KeptNumbers>(channels);
      share_ = places.take<double>(1);
      sums_ = places.take<double>(2 * channels);
      packet_ = places.take<double>(packet_doubles(channels));
      block_sums_ = places.take<ChannelSums>(most_block_sums(channels));
      arrived_ = places.take<unsigned>(channels + 1);
      memory_ = DeviceArena(places.end);
    }
    const std::size_t packets = world == 1 ? 0 : world * packet_doubles(channels) * sizeof(double);
    if (packets <= gathered_.bytes()) return is_new;
    gathered_ = DeviceArena(packets);
    return true;
  }

  std::span<double> own() { return {at<double>(packet_), packet_doubles(channels_)}; }
  std::span<double> all(std::size_t world) {
    return {reinterpret_cast<double*>(gathered_.data()), world * packet_doubles(channels_)};
  }
  std::span<double> sums() { return {at<double>(sums_), 2 * channels_}; }

  template <class T>
  void measure(cudaStream_t stream, const NormShape& shape, const T* x) {
    if (shape.size() == 0) return zero_device(stream, own().data(), own().size_bytes());
    sum<MomentTerm<SameElement<T>>>(
        "statistics of a batch norm", stream, shape, {x}, {x},
        KeepPacket{own().data(), channels_, static_cast<double>(shape.count())});
  }

  template <class R>
  void settle(cudaStream_t stream, const NormShape&, std::size_t world,
              const BatchNormOptions& options, const NormRunning<R>& running, std::string_view) {
    launch_kernel<settle_packets<SameElement<R>>>(
        "statistics of ranks", stream, channel_blocks(channels_), channel_threads,
        static_cast<const double*>(all(world).data()), world, channels_,
        settling(options, running, 0), blocks());
  }

  template <class T, class R>
  void measure_alone(cudaStream_t stream, const NormShape& shape, const T* x,
                     const BatchNormOptions& options, const NormRunning<R>& running) {
    if (shape.size() == 0) return;
    sum<MomentTerm<SameElement<T>>>("statistics of a batch norm", stream, shape, {x}, {x},
                                    settling(options, running, static_cast<double>(shape.count())));
  }

  template <class R>
  void settle_from_running(cudaStream_t stream, const NormShape&, const BatchNormOptions& options,
                           const NormRunning<R>& running) {
    launch_kernel<keep_running<SameElement<R>>>("running statistics", stream,
                                                channel_blocks(channels_), channel_threads, kept(),
                                                channels_, options.eps, same(running));
  }

  template <Fusion Fused, class T, class W>
  void normalise(cudaStream_t stream, const NormShape& shape, const T* x,
                 const NormAffine<W>& affine, const T* residual, T* y) {
    if (shape.size() == 0) return;
    launch_map("normalising", stream, shape, are_aligned({x, residual, y}),
               NormaliseMap<Fused, SameElement<T>, SameElement<W>>{x, residual, y, kept().channels,
                                                                   same(affine)});
  }

  template <Fusion Fused, class T, class W, class G>
  void reduce_backward(cudaStream_t stream, const NormShape& shape, const T* x, const T* y,
                       const T* dy, const NormAffine<W>& affine,
                       const NormAffineGradients<G>& gradients, T* dresidual) {
    if (shape.size() == 0) {
      zero_device(stream, sums().data(), sums().size_bytes());
      zero_device(stream, gradients.weight, channels_ * sizeof(G));
      zero_device(stream, gradients.bias, channels_ * sizeof(G));
      return;
    }
    using Term = GradientTerm<Fused, SameElement<T>, SameElement<W>>;
    sum<Term>("sums of gradients", stream, shape, {x, y, dy, dresidual},
              {x, y, dy, dresidual, kept().channels, same(affine)},
              KeepGradients<SameElement<G>>{
                  sums().data(), channels_, kept().channels, {gradients.weight, gradients.bias}});
  }

  template <Fusion Fused, class T, class W>
  void input_gradient(cudaStream_t stream, const NormShape& shape, const T* x, const T* dy,
                      const NormAffine<W>& affine, T* dx) {
    if (shape.size() == 0) return;
    launch_map("gradient of a batch norm", stream, shape, are_aligned({x, dy, dx}),
               InputGradientMap<Fused, SameElement<T>, SameElement<W>>{
                   x, dy, dx, kept(), sums().data(), channels_, same(affine)});
  }

 private:
  /// Arrays of one piece of memory, each of which begins at a multiple of 256 bytes.
  struct Places {
    std::size_t end = 0;
    template <class T>
    std::size_t take(std::size_t count) {
      const std::size_t begin = end;
      end += (count * sizeof(T) + 255) / 256 * 256;
      return begin;
    }
  };
  template <class T>
  T* at(std::size_t place) const {
    return reinterpret_cast<T*>(memory_.data() + place);
  }

  KeptMoments kept() const { return {at<KeptNumbers>(kept_), at<double>(share_)}; }
  BlockSums blocks() const { return {at<ChannelSums>(block_sums_), at<unsigned>(arrived_)}; }

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
  static NormAffine<SameElement<W>> same(const NormAffine<W>& affine) {
    return {affine.weight, affine.bias};
  }
  template <class R>
  SettleChannel<SameElement<R>> settling(const BatchNormOptions& options,
                                         const NormRunning<R>& running, double count) const {
    return {kept(), options, same(running), count};
  }

  std::size_t channels_ = 0;
  DeviceArena memory_{0};
  DeviceArena gathered_{0};
  std::size_t kept_ = 0;
  std::size_t share_ = 0;
  std::size_t sums_ = 0;
  std::size_t packet_ = 0;
  std::size_t block_sums_ = 0;
  std::size_t arrived_ = 0;
};

}  // namespace lockstep::detail
