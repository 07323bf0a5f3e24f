// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Sums over contiguous values on the host: in SIMD lanes, which a compiler turns into vector
/// registers, and in pieces that stay in the first cache.

#include "lockstep/core/element.hpp"
#include "lockstep/norm/statistics.hpp"

namespace lockstep::detail {

/// How many sums go on at a time.
inline constexpr std::size_t norm_lanes = 16;
/// Values that are summed in their accumulator's type, before the sum goes on in double.
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

/// The sums of what `add(i, first, second)` adds for each of `count` indices.
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

/// The moments of values that were summed about a number near their mean: of the deviations from
/// it, `sum` is that of themselves, `squares` that of their squares.
inline Moments moments_about(double about, double sum, double squares, double inverse_count) {
  const double shift = sum * inverse_count;
  return {about + shift, squares - sum * shift};
}

/// The moments of at most `norm_piece` values, in one pass, from their deviations from `about`. It
/// is no part of its callers, in which g++ would keep the lanes in memory.
template <class T, class A>
[[gnu::noinline]] Moments moments_about(const T* x, std::size_t count, A about) {
  const TwoSums<A> sums = lane_sums<A>(count, [x, about](std::size_t i, A& sum, A& squares) {
    const A deviation = static_cast<A>(x[i]) - about;
    sum += deviation;
    squares += deviation * deviation;
  });
  return moments_about(about, sums.first, sums.second, 1 / static_cast<double>(count));
}

/// The moments of values and of `before` others, whose moments are `all`. Deviations are from the
/// mean so far: where values are far from it, so far is the spread of all that it is the variance,
/// and no digits of that are lost, if there are not many more values than before. The first ones
/// have their mean found in a pass of its own.
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

/// The moments of any number of values.
template <class T>
inline Moments run_moments(const T* x, std::size_t count) {
  return more_moments(Moments{}, 0, x, count);
}

}  // namespace lockstep::detail
