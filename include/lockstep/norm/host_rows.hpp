// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The host's passes over rows of channels: (N, C), and images with their channels last. A
/// loop goes over the channels of a row, whose numbers lie as the values do.

#include <algorithm>
#include <cstddef>

#include "lockstep/core/element.hpp"
#include "lockstep/norm/host_channels.hpp"
#include "lockstep/norm/host_lanes.hpp"
#include "lockstep/norm/moments.hpp"
#include "lockstep/norm/norm_work.hpp"

namespace lockstep::detail {

/// The channels that are summed at a time; their sums stay in the first cache.
inline constexpr std::size_t norm_tile = 256;

/// Calls `f(first row, rows, first channel, channels)` for tiles of values that fit a cache, rows
/// in order for each channel.
template <class F>
inline void for_each_tile(const NormShape& shape, const F& f) {
  const std::size_t width = std::max<std::size_t>(1, std::min(shape.channels, norm_tile));
  const std::size_t rows = std::clamp<std::size_t>(4 * norm_piece / width, 16, 128);
  for (std::size_t n = 0; n < shape.samples; n += rows) {
    for (std::size_t c = 0; c < shape.channels; c += norm_tile)
      f(n, std::min(rows, shape.samples - n), c, std::min(norm_tile, shape.channels - c));
  }
}

/// Adds the moments of all values to those of no values.
template <class T>
void measure_rows(const NormShape& shape, const T* x, double* mean, double* m2) {
  using A = Accumulator<T>;
  const std::size_t stride = shape.channels;
  for_each_tile(shape, [&](std::size_t n, std::size_t rows, std::size_t c, std::size_t width) {
    const T* const tile = x + n * stride + c;
    const double inverse = 1 / static_cast<double>(rows);
    A about[norm_tile] = {};
    if (n == 0) {  // the mean of the first rows; then deviations are from the mean so far
      for (std::size_t row = 0; row != rows; ++row) {
        for (std::size_t i = 0; i != width; ++i) about[i] += static_cast<A>(tile[row * stride + i]);
      }
      for (std::size_t i = 0; i != width; ++i) about[i] *= static_cast<A>(inverse);
    } else {
      for (std::size_t i = 0; i != width; ++i) about[i] = static_cast<A>(mean[c + i]);
    }
    A sum[norm_tile] = {};
    A squares[norm_tile] = {};
    std::size_t row = 0;
    for (; row + 4 <= rows; row += 4) {  // four rows for every load and store of a sum
      const T* const a = tile + row * stride;
      for (std::size_t i = 0; i != width; ++i) {
        const A first = static_cast<A>(a[i]) - about[i];
        const A second = static_cast<A>(a[stride + i]) - about[i];
        const A third = static_cast<A>(a[2 * stride + i]) - about[i];
        const A fourth = static_cast<A>(a[3 * stride + i]) - about[i];
        sum[i] += (first + second) + (third + fourth);
        squares[i] += (first * first + second * second) + (third * third + fourth * fourth);
      }
    }
    for (; row != rows; ++row) {
      for (std::size_t i = 0; i != width; ++i) {
        const A apart = static_cast<A>(tile[row * stride + i]) - about[i];
        sum[i] += apart;
        squares[i] += apart * apart;
      }
    }
    // Chan's factors are those of all channels.
    const auto before = static_cast<double>(n);
    const double share = static_cast<double>(rows) / (before + static_cast<double>(rows));
    const double spread = before * share;
    for (std::size_t i = 0; i != width; ++i) {
      const Moments more = moments_about(about[i], sum[i], squares[i], inverse);
      const double apart = more.mean - mean[c + i];
      mean[c + i] += apart * share;
      m2[c + i] += more.m2 + apart * apart * spread;
    }
  });
}

template <Fusion Fused, class T, class A>
void normalise_rows(const NormShape& shape, const HostChannels<A>& channels, const T* x,
                    [[maybe_unused]] const T* residual, T* y) {
  const std::size_t width = shape.channels;
  for (std::size_t n = 0; n != shape.samples; ++n) {
    const std::size_t at = n * width;
#pragma GCC ivdep
    for (std::size_t c = 0; c != width; ++c) {
      A other = 0;
      if constexpr (Fused == Fusion::add_relu) other = static_cast<A>(residual[at + c]);
      y[at + c] = stored_output<Fused, T>(channels[c].normal(static_cast<A>(x[at + c])), other);
    }
  }
}

template <Fusion Fused, class T, class A>
void reduce_rows(const NormShape& shape, const HostChannels<A>& channels, const T* x, const T* y,
                 const T* dy, [[maybe_unused]] T* dresidual, double* sums) {
  for_each_tile(shape, [&](std::size_t n, std::size_t rows, std::size_t first, std::size_t width) {
    A gradients[norm_tile] = {};
    A products[norm_tile] = {};
    for (std::size_t row = n; row != n + rows; ++row) {
      const std::size_t at = row * shape.channels + first;
#pragma GCC ivdep
      for (std::size_t i = 0; i != width; ++i) {
        const HostChannel<A> channel = channels[first + i];
        const A value = static_cast<A>(x[at + i]);
        const A g =
            gradient_before<Fused, T>(channel, value, y, at + i, static_cast<A>(dy[at + i]));
        if constexpr (Fused == Fusion::add_relu) dresidual[at + i] = static_cast<T>(g);
        gradients[i] += g;
        products[i] += g * channel.apart(value);
      }
    }
    for (std::size_t i = 0; i != width; ++i) {
      sums[first + i] += gradients[i];
      sums[shape.channels + first + i] += products[i];
    }
  });
}

template <Fusion Fused, class T, class A>
void gradient_rows(const NormShape& shape, const HostChannels<A>& channels, const T* x, const T* dy,
                   T* dx) {
  const std::size_t width = shape.channels;
  for (std::size_t n = 0; n != shape.samples; ++n) {
    const std::size_t at = n * width;
#pragma GCC ivdep
    for (std::size_t c = 0; c != width; ++c) {
      const HostChannel<A> channel = channels[c];
      const A value = static_cast<A>(x[at + c]);
      const A g = gradient_before<Fused, T>(channel, value, static_cast<const T*>(nullptr), at + c,
                                            static_cast<A>(dy[at + c]));
      dx[at + c] = static_cast<T>(channel.input_gradient(value, g));
    }
  }
}

}  // namespace lockstep::detail
