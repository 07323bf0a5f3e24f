// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The host's passes over samples whose channels have runs of positions: (N, C, L) and
/// (N, C, H, W). Memory is read in its order, and a run has one channel's numbers.

#include <algorithm>
#include <cstddef>

#include "lockstep/core/element.hpp"
#include "lockstep/norm/host_channels.hpp"
#include "lockstep/norm/host_lanes.hpp"
#include "lockstep/norm/moments.hpp"
#include "lockstep/norm/norm_work.hpp"

namespace lockstep::detail {

/// Calls `f(channel, first value)` for every run.
template <class F>
inline void for_each_run(const NormShape& shape, const F& f) {
  std::size_t at = 0;
  for (std::size_t n = 0; n != shape.samples; ++n) {
    for (std::size_t c = 0; c != shape.channels; ++c, at += shape.positions) f(c, at);
  }
}

/// Adds the moments of all values to those of no values.
template <class T>
void measure_runs(const NormShape& shape, const T* x, double* mean, double* m2) {
  for (std::size_t n = 0; n != shape.samples; ++n) {
    const auto before = static_cast<double>(n * shape.positions);
    for (std::size_t c = 0; c != shape.channels; ++c, x += shape.positions) {
      const Moments all = more_moments({mean[c], m2[c]}, before, x, shape.positions);
      mean[c] = all.mean;
      m2[c] = all.m2;
    }
  }
}

template <Fusion Fused, class T, class A>
void normalise_runs(const NormShape& shape, const HostChannels<A>& channels, const T* x,
                    [[maybe_unused]] const T* residual, T* y) {
  for_each_run(shape, [&](std::size_t c, std::size_t at) {
    const HostChannel<A> channel = channels[c];
#pragma GCC ivdep
    for (std::size_t i = at; i != at + shape.positions; ++i) {
      A other = 0;
      if constexpr (Fused == Fusion::add_relu) other = static_cast<A>(residual[i]);
      y[i] = stored_output<Fused, T>(channel.normal(static_cast<A>(x[i])), other);
    }
  });
}

/// The sums of g and of g * (x - mean) over a piece of a run. As `moments_about`, it is no part of
/// its caller.
template <Fusion Fused, class T, class A>
[[gnu::noinline]] TwoSums<A> piece_sums(const T* x, const T* dy, std::size_t count,
                                        HostChannel<A> channel) {
  return lane_sums<A>(count, [x, dy, channel](std::size_t i, A& gradients, A& products) {
    const A value = static_cast<A>(x[i]);
    const A g = gradient_before<Fused, T>(channel, value, static_cast<const T*>(nullptr), i,
                                          static_cast<A>(dy[i]));
    gradients += g;
    products += g * channel.apart(value);
  });
}

template <Fusion Fused, class T, class A>
void reduce_runs(const NormShape& shape, const HostChannels<A>& channels, const T* x,
                 [[maybe_unused]] const T* y, const T* dy, [[maybe_unused]] T* dresidual,
                 double* sums) {
  for_each_run(shape, [&](std::size_t c, std::size_t at) {
    const HostChannel<A> channel = channels[c];
    for (std::size_t done = 0; done < shape.positions; done += norm_piece) {
      const std::size_t first = at + done;
      const std::size_t count = std::min(shape.positions - done, norm_piece);
      TwoSums<A> piece;
      if constexpr (Fused == Fusion::add_relu) {
#pragma GCC ivdep
        for (std::size_t i = first; i != first + count; ++i)
          dresidual[i] = static_cast<T>(passed_gradient(y[i], static_cast<A>(dy[i])));
        piece = piece_sums<Fusion::none>(x + first, dresidual + first, count, channel);
      } else {
        piece = piece_sums<Fused>(x + first, dy + first, count, channel);
      }
      sums[c] += piece.first;
      sums[shape.channels + c] += piece.second;
    }
  });
}

template <Fusion Fused, class T, class A>
void gradient_runs(const NormShape& shape, const HostChannels<A>& channels, const T* x, const T* dy,
                   T* dx) {
  for_each_run(shape, [&](std::size_t c, std::size_t at) {
    const HostChannel<A> channel = channels[c];
#pragma GCC ivdep
    for (std::size_t i = at; i != at + shape.positions; ++i) {
      const A value = static_cast<A>(x[i]);
      const A g = gradient_before<Fused, T>(channel, value, static_cast<const T*>(nullptr), i,
                                            static_cast<A>(dy[i]));
      dx[i] = static_cast<T>(channel.input_gradient(value, g));
    }
  });
}

}  // namespace lockstep::detail
