// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The numbers of channels by which the host's loops normalise, and the arithmetic for one
/// value.

#include <cstddef>
#include <vector>

#include "lockstep/core/element.hpp"
#include "lockstep/norm/norm_work.hpp"

namespace lockstep::detail {

/// One channel's numbers, in the type of sums.
template <class A>
struct HostChannel {
  A high;
  A low;
  A scale;
  A shift;
  A gradient;
  A slope;

  /// x's deviation from the mean.
  A apart(A x) const { return (x - high) - low; }
  /// x normalised. Forward and backward have the same bits.
  A normal(A x) const { return apart(x) * scale + shift; }
  /// The input's gradient, from the output's before the ReLU.
  A input_gradient(A x, A g) const { return ((g - gradient) - apart(x) * slope) * scale; }
};

/// The numbers of all channels, each in an array of its own.
template <class A>
struct HostChannels {
  A* high;
  A* low;
  A* scale;
  A* shift;
  A* gradient;
  A* slope;

  HostChannels(std::vector<A>& memory, std::size_t channels) {
    if (memory.size() < 6 * channels) memory.resize(6 * channels);
    high = memory.data();
    low = high + channels;
    scale = low + channels;
    shift = scale + channels;
    gradient = shift + channels;
    slope = gradient + channels;
  }

  HostChannel<A> operator[](std::size_t c) const {
    return {high[c], low[c], scale[c], shift[c], gradient[c], slope[c]};
  }
};

/// The output's value as it is stored. A NaN stays one.
template <Fusion Fused, class T, class A>
inline T stored_output(A normal, [[maybe_unused]] A residual) {
  if constexpr (Fused == Fusion::none) {
    return static_cast<T>(normal);
  } else {
    const A value = Fused == Fusion::add_relu ? normal + residual : normal;
    return static_cast<T>(value < 0 ? A(0) : value);
  }
}

/// The output's gradient where `output`, as it was stored, let the value pass.
template <class T, class A>
inline A passed_gradient(T output, A gradient) {
  return static_cast<A>(output) <= 0 ? A(0) : gradient;
}

/// The output's gradient before the ReLU: g of `NormWork`.
template <Fusion Fused, class T, class A>
inline A gradient_before(const HostChannel<A>& channel, A x, const T* y, std::size_t i, A dy) {
  if constexpr (Fused == Fusion::relu) {
    return passed_gradient(static_cast<T>(channel.normal(x)), dy);
  } else if constexpr (Fused == Fusion::add_relu) {
    return passed_gradient(y[i], dy);
  } else {
    return dy;
  }
}

}  // namespace lockstep::detail
