// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batch norms in host memory: what `NormWork` describes, in vectorised loops.

#include <algorithm>
#include <cstddef>
#include <span>
#include <string_view>
#include <tuple>
#include <vector>

#include "lockstep/bucket/write_gradient.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/norm/host_channels.hpp"
#include "lockstep/norm/host_lanes.hpp"
#include "lockstep/norm/host_rows.hpp"
#include "lockstep/norm/host_runs.hpp"
#include "lockstep/norm/moments.hpp"
#include "lockstep/norm/norm_work.hpp"
#include "lockstep/norm/refusals.hpp"

namespace lockstep::detail {

template <>
class NormWork<HostMemory> {
 public:
  NormWork() = default;

  /// Room for all numbers of channels. Returns whether it was missing.
  bool reserve(std::size_t channels, std::size_t world);

  std::span<double> own() { return {packets_.data(), packet_doubles(channels_)}; }
  std::span<double> all(std::size_t world) {
    return {packets_.data() + packet_doubles(channels_), world * packet_doubles(channels_)};
  }
  std::span<double> sums() { return {sums_.data(), 2 * channels_}; }

  template <class T>
  void measure(HostStream, const NormShape& shape, const T* x) {
    double* const mean = packets_.data();
    double* const m2 = mean + channels_;
    std::fill(mean, m2 + channels_, 0.0);
    if (shape.positions == 1) {
      measure_rows(shape, x, mean, m2);
    } else if (shape.positions != 0) {
      measure_runs(shape, x, mean, m2);
    }
    packets_[2 * channels_] = static_cast<double>(shape.count());
  }

  template <class R>
  void settle(HostStream, const NormShape&, std::size_t world, const BatchNormOptions& options,
              const NormRunning<R>& running, std::string_view name) {
    settle_packets(packets_.data() + packet_doubles(channels_), world, options, name);
    track(options, running);
  }

  template <class T, class R>
  void measure_alone(HostStream stream, const NormShape& shape, const T* x,
                     const BatchNormOptions& options, const NormRunning<R>& running) {
    measure(stream, shape, x);
    settle_packets(packets_.data(), 1, options, {});
    track(options, running);
  }

  template <class R>
  void settle_from_running(HostStream, const NormShape&, const BatchNormOptions& options,
                           const NormRunning<R>& running) {
    for (std::size_t c = 0; c != channels_; ++c) {
      mean_[c] = converted<double>(running.mean[c]);
      inverse_[c] = inverse_deviation(converted<double>(running.variance[c]), options.eps);
    }
  }

  template <Fusion Fused, class T, class W>
  void normalise(HostStream, const NormShape& shape, const T* x, const NormAffine<W>& affine,
                 const T* residual, T* y) {
    const HostChannels<Accumulator<T>> channels = forward_channels<Accumulator<T>>(affine);
    if (shape.positions == 1) {
      normalise_rows<Fused>(shape, channels, x, residual, y);
    } else {
      normalise_runs<Fused>(shape, channels, x, residual, y);
    }
  }

  template <Fusion Fused, class T, class W, class G>
  void reduce_backward(HostStream, const NormShape& shape, const T* x, const T* y, const T* dy,
                       const NormAffine<W>& affine, const NormAffineGradients<G>& gradients,
                       T* dresidual) {
    const HostChannels<Accumulator<T>> channels = forward_channels<Accumulator<T>>(affine);
    std::ranges::fill(sums_, 0.0);
    if (shape.positions == 1) {
      reduce_rows<Fused>(shape, channels, x, y, dy, dresidual, sums_.data());
    } else {
      reduce_runs<Fused>(shape, channels, x, y, dy, dresidual, sums_.data());
    }
    for (std::size_t c = 0; c != channels_; ++c) {
      if (gradients.weight != nullptr)
        gradients.weight[c] = converted<G>(sums_[channels_ + c] * inverse_[c]);
      if (gradients.bias != nullptr) gradients.bias[c] = converted<G>(sums_[c]);
    }
  }

  template <Fusion Fused, class T, class W>
  void input_gradient(HostStream, const NormShape& shape, const T* x, const T* dy,
                      const NormAffine<W>& affine, T* dx) {
    using A = Accumulator<T>;
    HostChannels<A> channels = forward_channels<A>(affine);
    const double share = count_ == 0 ? 0 : 1 / count_;
    for (std::size_t c = 0; c != channels_; ++c) {
      channels.gradient[c] = static_cast<A>(sums_[c] * share);
      channels.slope[c] =
          static_cast<A>(sums_[channels_ + c] * share * (inverse_[c] * inverse_[c]));
    }
    if (shape.positions == 1) {
      gradient_rows<Fused>(shape, channels, x, dy, dx);
    } else {
      gradient_runs<Fused>(shape, channels, x, dy, dx);
    }
  }

 private:
  /// Means, squared deviations and the count of all ranks, from their packets.
  void settle_packets(const double* packets, std::size_t world, const BatchNormOptions& options,
                      std::string_view name);

  /// Moves the running statistics towards the batch's.
  template <class R>
  void track(const BatchNormOptions& options, const NormRunning<R>& running) const {
    if (count_ == 0) return;
    const double share = running_share(options.momentum, *running.batches);
    for (std::size_t c = 0; c != channels_; ++c) {
      running.mean[c] =
          converted<R>(updated_running(converted<double>(running.mean[c]), mean_[c], share));
      running.variance[c] = converted<R>(updated_running(converted<double>(running.variance[c]),
                                                         unbiased_variance(m2_[c], count_), share));
    }
    ++*running.batches;
  }

  /// The numbers by which forward normalises, the same bits every time.
  template <class A, class W>
  HostChannels<A> forward_channels(const NormAffine<W>& affine) {
    HostChannels<A> channels(std::get<std::vector<A>>(numbers_), channels_);
    for (std::size_t c = 0; c != channels_; ++c) {
      const Centre<A> centre(mean_[c]);
      channels.high[c] = centre.high;
      channels.low[c] = centre.low;
      channels.scale[c] = static_cast<A>(converted<double>(affine.weight[c]) * inverse_[c]);
      channels.shift[c] = converted<A>(affine.bias[c]);
    }
    return channels;
  }

  std::size_t channels_ = 0;
  double count_ = 0;
  std::vector<double> packets_;  // this rank's, then those of all
  std::vector<double> mean_;
  std::vector<double> m2_;
  std::vector<double> inverse_;
  std::vector<double> sums_;
  std::tuple<std::vector<float>, std::vector<double>> numbers_;
};

inline bool NormWork<HostMemory>::reserve(std::size_t channels, std::size_t world) {
  const std::size_t packets = (world == 1 ? 1 : world + 1) * packet_doubles(channels);
  if (channels == channels_ && packets <= packets_.size()) return false;
  channels_ = channels;
  packets_.resize(std::max(packets, packets_.size()));
  mean_.resize(channels);
  m2_.resize(channels);
  inverse_.resize(channels);
  sums_.resize(2 * channels);
  return true;
}

inline void NormWork<HostMemory>::settle_packets(const double* packets, std::size_t world,
                                                 const BatchNormOptions& options,
                                                 std::string_view name) {
  count_ = count_of_packets(packets, world, channels_);
  if (count_ == 1) [[unlikely]]
    refuse_single_value(name);
  for (std::size_t c = 0; c != channels_; ++c) {
    const Moments moments = merged_packets(packets, world, channels_, c);
    mean_[c] = moments.mean;
    m2_[c] = moments.m2;
    inverse_[c] = inverse_deviation(count_ == 0 ? 0 : moments.m2 / count_, options.eps);
  }
}

}  // namespace lockstep::detail
