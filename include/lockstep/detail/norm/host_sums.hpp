// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Vectorised sums over contiguous values on the host, in pieces that stay in the L1 cache.

#include "lockstep/detail/norm/statistics.hpp"

namespace lockstep::detail {

/// SIMD lanes: independent partial sums.
inline constexpr std::size_t norm_lanes = 16;
/// Values that are summed in the accumulator type before the sum continues in double.
inline constexpr std::size_t norm_piece = 2048;

template <class A>
inline A lanes_total(const A (&lanes)[norm_lanes]) {
  A sums[norm_lanes / 2];
  for (std::size_t l = 0; l != norm_lanes / 2; ++l) sums[l] = lanes[l] + lanes[l + norm_lanes / 2];
  for (std::size_t half = norm_lanes / 4; half != 0; half /= 2) {
    for (std::size_t l = 0; l != half; ++l) sums[l] += sums[l + half];
  }
  return sums[0];
}

/// Sums what `add(i, first, second)` adds for each of `count` indices.
template <class A, class Add>
inline TwoSums<A> lane_sums(std::size_t count, const Add& add) {
  const std::size_t whole = count / norm_lanes * norm_lanes;
  A first[norm_lanes] = {};
  A second[norm_lanes] = {};
  for (std::size_t i = 0; i != whole; i += norm_lanes) {
    for (std::size_t l = 0; l != norm_lanes; ++l) add(i + l, first[l], second[l]);
  }
  TwoSums<A> rest{0, 0};
  for (std::size_t i = whole; i != count; ++i) add(i, rest.first, rest.second);
  return {lanes_total(first) + rest.first, lanes_total(second) + rest.second};
}

/// Moments from the sums of deviations from `about`, a number near the mean, and of their squares.
inline Moments moments_about(double about, double sum, double squares, double inverse_count) {
  const double shift = sum * inverse_count;
  return {about + shift, squares - sum * shift};
}

/// The moments of at most `norm_piece` values. Inlined, g++ would keep the lanes in memory.
template <class T, class A>
[[gnu::noinline]] Moments moments_about(const T* x, std::size_t count, A about) {
  const TwoSums<A> sums = lane_sums<A>(count, [x, about](std::size_t i, A& sum, A& squares) {
    const A deviation = static_cast<A>(x[i]) - about;
    sum += deviation;
    squares += deviation * deviation;
  });
  return moments_about(about, sums.first, sums.second, 1 / static_cast<double>(count));
}

/// Merges more values into the moments of `before` values. Deviations are from the mean so far: if
/// the new values are far from it, their distance dominates the variance and cancellation costs no
/// digits, unless they far outnumber the earlier ones. The first piece's mean takes an extra pass.
template <class T>
inline Moments more_moments(Moments all, double before, const T* x, std::size_t count) {
  using A = Accumulator<T>;
  for (std::size_t done = 0; done < count;) {
    const std::size_t more = std::min(count - done, norm_piece);
    A about = static_cast<A>(all.mean);
    if (before == 0) {
      const auto add = [from = x + done](std::size_t i, A& sum, A&) {
        sum += static_cast<A>(from[i]);
      };
      about = lane_sums<A>(more, add).first / static_cast<A>(more);
    }
    all = merged(all, before, moments_about(x + done, more, about), static_cast<double>(more));
    before += static_cast<double>(more);
    done += more;
  }
  return all;
}

inline Moments run_moments(const auto* x, std::size_t count) {
  return more_moments(Moments{}, 0, x, count);
}

}  // namespace lockstep::detail
