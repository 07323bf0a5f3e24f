// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Statistics of batch norms, merged over ranks by Chan's formula; shared by host and device.

#include "lockstep/detail/bucket/step.hpp"

namespace lockstep {

/// The momentum for plain averages over all batches: PyTorch's `momentum=None`.
inline constexpr double cumulative_average = -1;

/// `BatchNorm<"bn1", 64> norm1{{.eps = 1e-3, .momentum = 0.01}};`
struct BatchNormOptions {
  /// Added to the variance.
  double eps = 1e-5;
  /// The weight of a new batch in the running statistics.
  double momentum = 0.1;
};

namespace detail {

/// Mean of values, and sum of their squared deviations from the mean.
struct Moments {
  double mean = 0;
  double m2 = 0;
};

/// The moments of a + b values (Chan, Golub, LeVeque: Updating Formulae and a Pairwise Algorithm
/// for Computing Sample Variances, 1979), without cancellation of large numbers.
LOCKSTEP_HOST_DEVICE constexpr Moments merged(Moments a, double a_count, Moments b,
                                              double b_count) {
  if (b_count == 0) return a;
  if (a_count == 0) return b;
  const double share = b_count / (a_count + b_count);
  const double delta = b.mean - a.mean;
  return {a.mean + delta * share, a.m2 + b.m2 + delta * delta * (a_count * share)};
}

/// A rank's packet: all channels' means, their sums of squared deviations, and the count of values.
LOCKSTEP_HOST_DEVICE constexpr std::size_t packet_doubles(std::size_t channels) {
  return 2 * channels + 1;
}

/// Values per channel over the packets of all ranks.
LOCKSTEP_HOST_DEVICE constexpr double count_of_packets(const double* packets, std::size_t world,
                                                       std::size_t channels) {
  double count = 0;
  for (std::size_t rank = 0; rank != world; ++rank)
    count += packets[(rank + 1) * packet_doubles(channels) - 1];
  return count;
}

/// One channel's moments over all ranks, merged in rank order: bitwise the same everywhere.
LOCKSTEP_HOST_DEVICE constexpr Moments merged_packets(const double* packets, std::size_t world,
                                                      std::size_t channels, std::size_t channel) {
  Moments all;
  double count = 0;
  for (std::size_t rank = 0; rank != world; ++rank) {
    const double* const packet = packets + rank * packet_doubles(channels);
    const double own = packet[2 * channels];
    all = merged(all, count, {packet[channel], packet[channels + channel]}, own);
    count += own;
  }
  return all;
}

LOCKSTEP_HOST_DEVICE inline double inverse_deviation(double variance, double eps) {
  return 1 / std::sqrt(variance + eps);
}

/// Mean and inverse deviation of a channel or row. A GPU reads them by one load.
struct alignas(16) SavedStatistics {
  double mean;
  double inverse;
};

/// The weight of a new batch in the running statistics after `batches` earlier ones.
LOCKSTEP_HOST_DEVICE constexpr double running_share(double momentum, std::int64_t batches) {
  return momentum < 0 ? 1 / static_cast<double>(batches + 1) : momentum;
}

/// The running variance estimates the population's variance from a sample.
LOCKSTEP_HOST_DEVICE constexpr double unbiased_variance(double m2, double count) {
  return m2 / (count > 1 ? count - 1 : 1);
}

LOCKSTEP_HOST_DEVICE constexpr double updated_running(double running, double of_batch,
                                                      double share) {
  return (1 - share) * running + share * of_batch;
}

template <class A>
struct TwoSums {  // no initialisers: shared memory allows none
  A first;
  A second;

  friend LOCKSTEP_HOST_DEVICE constexpr TwoSums operator+(const TwoSums& a, const TwoSums& b) {
    return {a.first + b.first, a.second + b.second};
  }
};

/// A double mean in the elements' arithmetic. A float keeps 24 bits of a mean, too few for large
/// means, so it is split into two: (x - high) is exact if x is near the mean.
template <class A>
struct SplitMean {
  A high;
  A low;

  SplitMean() = default;
  LOCKSTEP_HOST_DEVICE explicit SplitMean(double mean)
      : high(static_cast<A>(mean)), low(static_cast<A>(mean - static_cast<double>(high))) {}
  LOCKSTEP_HOST_DEVICE A deviation(A value) const { return (value - high) - low; }
};

/// Does ReLU block the gradient of this output? NaN passes, as in forward.
template <class T>
LOCKSTEP_HOST_DEVICE bool is_stopped(T output) {
  return static_cast<Accumulator<T>>(output) <= 0;
}

/// A batch norm's statistics on the host from forward to backward: this rank's packet, the packets
/// of all ranks, the merged statistics, and the sums of gradients.
class HostStatistics {
 public:
  bool reserve(std::size_t channels, std::size_t world) {
    const std::size_t packets = (world == 1 ? 1 : world + 1) * packet_doubles(channels);
    if (channels == channels_ && packets <= packets_.size()) return false;
    channels_ = channels;
    packets_.resize(std::max(packets, packets_.size()));
    for (std::vector<double>* each : {&mean_, &m2_, &inverse_}) each->resize(channels);
    sums_.resize(2 * channels);
    return true;
  }

  std::span<double> own() { return {packets_.data(), packet_doubles(channels_)}; }
  std::span<double> all(std::size_t world) {
    return {packets_.data() + packet_doubles(channels_), world * packet_doubles(channels_)};
  }
  std::span<double> sums() { return {sums_.data(), 2 * channels_}; }

  /// Merges the packets of all ranks. Throws if the count is one.
  void merge(const double* packets, std::size_t world, double eps, std::string_view name);

  std::size_t channels() const { return channels_; }
  /// Values per channel over all ranks.
  double count() const { return count_; }
  const std::vector<double>& means() const { return mean_; }
  const std::vector<double>& inverses() const { return inverse_; }
  double variance(std::size_t c) const { return count_ == 0 ? 0 : m2_[c] / count_; }

  /// Updates running statistics with weight `share` for the batch.
  template <class R>
  void track(R* mean, R* variance, double share) const {
    for (std::size_t c = 0; c != channels_; ++c) {
      mean[c] = converted<R>(updated_running(converted<double>(mean[c]), mean_[c], share));
      variance[c] = converted<R>(updated_running(converted<double>(variance[c]),
                                                 unbiased_variance(m2_[c], count_), share));
    }
  }
  template <class R>
  void use_running(const R* mean, const R* variance, double eps) {
    for (std::size_t c = 0; c != channels_; ++c) {
      mean_[c] = converted<double>(mean[c]);
      inverse_[c] = inverse_deviation(converted<double>(variance[c]), eps);
    }
  }

 private:
  std::size_t channels_ = 0;
  double count_ = 0;
  std::vector<double> packets_;  // this rank's, then those of all ranks
  std::vector<double> mean_;
  std::vector<double> m2_;
  std::vector<double> inverse_;
  std::vector<double> sums_;
};

}  // namespace detail

}  // namespace lockstep
