// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Sums over values that lie one behind the other, on the host: in lanes, which a compiler
/// turns into vector registers, and in pieces that stay in the first cache.

#include <algorithm>
#include <cstddef>

#include "lockstep/core/element.hpp"
#include "lockstep/norm/moments.hpp"

namespace lockstep::detail {

/// How many sums go on at a time.
inline constexpr std::size_t norm_lanes = 16;
/// Values that are summed in their accumulator's type, before the sum goes on in double.
inline constexpr std::size_t norm_piece = 2048;

template <class A>
inline A total(const A (&lanes)[norm_lanes]) {
  A sums[norm_lanes / 2];
  for (std::size_t l = 0; l != norm_lanes / 2; ++l) sums[l] = lanes[l] + lanes[l + norm_lanes / 2];
  for (std::size_t half = norm_lanes / 4; half != 0; half /= 2) {
    for (std::size_t l = 0; l != half; ++l) sums[l] += sums[l + half];
  }
  return sums[0];
}

/// The sums of two functions of values.
template <class A>
struct TwoSums {
  A first;
  A second;
};

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
  return {total(first) + rest.first, total(second) + rest.second};
}

/// The sum of values in lanes.
template <class A, class T>
inline A lane_sum(const T* x, std::size_t count) {
  const std::size_t whole = count / norm_lanes * norm_lanes;
  A lanes[norm_lanes] = {};
  for (std::size_t i = 0; i != whole; i += norm_lanes) {
    for (std::size_t l = 0; l != norm_lanes; ++l) lanes[l] += static_cast<A>(x[i + l]);
  }
  A rest = 0;
  for (std::size_t i = whole; i != count; ++i) rest += static_cast<A>(x[i]);
  return total(lanes) + rest;
}

/// The moments of values that were summed about a number near their mean: of the deviations from
/// it, `sum` is that of themselves, `squares` that of their squares.
inline Moments moments_about(double about, double sum, double squares, double inverse_count) {
  const double shift = sum * inverse_count;
  return {about + shift, squares - sum * shift};
}

/// The moments of at most `norm_piece` values: their mean first, then deviations from it, while
/// they are in the cache.
template <class T>
inline Moments piece_moments(const T* x, std::size_t count) {
  using A = Accumulator<T>;
  const double inverse = 1 / static_cast<double>(count);
  const A about = lane_sum<A>(x, count) * static_cast<A>(inverse);
  const TwoSums<A> sums = lane_sums<A>(count, [x, about](std::size_t i, A& sum, A& squares) {
    const A apart = static_cast<A>(x[i]) - about;
    sum += apart;
    squares += apart * apart;
  });
  return moments_about(about, sums.first, sums.second, inverse);
}

/// The moments of any number of values.
template <class T>
inline Moments run_moments(const T* x, std::size_t count) {
  if (count == 0) return {};
  Moments all = piece_moments(x, std::min(count, norm_piece));
  for (std::size_t done = norm_piece; done < count; done += norm_piece) {
    const std::size_t more = std::min(count - done, norm_piece);
    all = merged(all, static_cast<double>(done), piece_moments(x + done, more),
                 static_cast<double>(more));
  }
  return all;
}

/// Where a value of an accumulator's type is subtracted from a mean of double precision: high is
/// the mean rounded, low is what that leaves out. (x - high) is exact where x is near the mean.
template <class A>
struct Centre {
  A high = 0;
  A low = 0;

  Centre() = default;
  explicit Centre(double mean)
      : high(static_cast<A>(mean)), low(static_cast<A>(mean - static_cast<double>(high))) {}

  /// x's deviation from the mean.
  A apart(A x) const { return (x - high) - low; }
};

}  // namespace lockstep::detail
