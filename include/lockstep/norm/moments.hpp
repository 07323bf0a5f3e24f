// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The statistics of a batch norm: mean and squared deviations of values, merged by Chan's
/// method, and what training makes of them. Host and device share this arithmetic.

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "lockstep/core/macros.hpp"

namespace lockstep {

/// The momentum of running statistics that are plain averages over all batches, as PyTorch's
/// `momentum=None`.
inline constexpr double cumulative_average = -1;

/// `BatchNorm<"bn1", 64> norm1{{.eps = 1e-3, .momentum = 0.01}};`
struct BatchNormOptions {
  /// It is added to the variance.
  double eps = 1e-5;
  /// The share of a batch in the running statistics.
  double momentum = 0.1;
};

namespace detail {

/// The mean of some values, and the sum of their squared deviations from it.
struct Moments {
  double mean = 0;
  double m2 = 0;
};

/// The moments of a + b values (Chan, Golub, LeVeque: Updating Formulae and a Pairwise Algorithm
/// for Computing Sample Variances, 1979). No large numbers are subtracted from each other.
LOCKSTEP_HOST_DEVICE constexpr Moments merged(Moments a, double a_count, Moments b,
                                              double b_count) {
  if (b_count == 0) return a;
  if (a_count == 0) return b;
  const double share = b_count / (a_count + b_count);
  const double apart = b.mean - a.mean;
  return {a.mean + apart * share, a.m2 + b.m2 + apart * apart * (a_count * share)};
}

/// The statistics of one rank are a packet of doubles: a mean for every channel, the squared
/// deviations of every channel, and how many values a channel has.
LOCKSTEP_HOST_DEVICE constexpr std::size_t packet_size(std::size_t channels) {
  return 2 * channels + 1;
}

/// How many values the packets of all ranks count in each channel.
LOCKSTEP_HOST_DEVICE constexpr double count_of_packets(const double* packets, std::size_t world,
                                                       std::size_t channels) {
  double count = 0;
  for (std::size_t rank = 0; rank != world; ++rank)
    count += packets[(rank + 1) * packet_size(channels) - 1];
  return count;
}

/// The moments of one channel over all ranks, merged in their order: the same bits everywhere.
LOCKSTEP_HOST_DEVICE constexpr Moments merged_packets(const double* packets, std::size_t world,
                                                      std::size_t channels, std::size_t channel) {
  Moments all;
  double count = 0;
  for (std::size_t rank = 0; rank != world; ++rank) {
    const double* const packet = packets + rank * packet_size(channels);
    const double own = packet[2 * channels];
    all = merged(all, count, {packet[channel], packet[channels + channel]}, own);
    count += own;
  }
  return all;
}

/// What a value's deviation from the mean is multiplied by.
LOCKSTEP_HOST_DEVICE inline double inverse_deviation(double variance, double eps) {
  return 1 / std::sqrt(variance + eps);
}

/// The share of a new batch in the running statistics; `batches` were tracked before it.
LOCKSTEP_HOST_DEVICE constexpr double running_share(double momentum, std::int64_t batches) {
  return momentum < 0 ? 1 / static_cast<double>(batches + 1) : momentum;
}

/// The running variance estimates that of all data, from which a batch is a sample.
LOCKSTEP_HOST_DEVICE constexpr double unbiased_variance(double m2, double count) {
  return m2 / (count > 1 ? count - 1 : 1);
}

/// A running statistic after a batch.
LOCKSTEP_HOST_DEVICE constexpr double updated_running(double running, double of_batch,
                                                      double share) {
  return (1 - share) * running + share * of_batch;
}

}  // namespace detail

}  // namespace lockstep
