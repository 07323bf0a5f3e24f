// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What norms ask of the memory that they work in: `NormWork<HostMemory>` is in
/// host_norm.hpp, `LayerNormWork<HostMemory>` in host_layer_norm.hpp, a GPU's in device_norm.cuh.

#include <cstddef>
#include <cstdint>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// The passes that are done together with normalising.
enum class Fusion : std::uint8_t { none, relu, add_relu };

/// A tensor as samples of channels, each of which has its positions one behind the other. The rows
/// of a matrix, and channels-last images, have one position.
struct NormShape {
  std::size_t samples = 0;
  std::size_t channels = 0;
  std::size_t positions = 1;

  /// How many values a channel has.
  LOCKSTEP_HOST_DEVICE constexpr std::size_t count() const { return samples * positions; }
  LOCKSTEP_HOST_DEVICE constexpr std::size_t size() const { return count() * channels; }
  constexpr bool operator==(const NormShape&) const = default;
};

/// The trained scale and shift of all channels, as W elements.
template <class W>
struct NormAffine {
  const W* weight = nullptr;
  const W* bias = nullptr;
};

/// Their gradients; null for a frozen one.
template <class G>
struct NormAffineGradients {
  G* weight = nullptr;
  G* bias = nullptr;
};

/// The running statistics of all channels, as R elements.
template <class R>
struct NormRunning {
  R* mean = nullptr;
  R* variance = nullptr;
  std::int64_t* batches = nullptr;
};

/// The stream of the host, which does everything at once.
struct HostStream {};

/// One layer's statistics and the passes over its activations. T is the activations' type, which
/// are read and written once per pass; numbers of channels are doubles. All calls are enqueued on
/// `stream`. A copy is a fresh object.
///
/// - `bool reserve(channels, world)` makes room, and says whether it had to. Called in every
///   forward pass, before everything else.
/// - `measure(stream, shape, x)` finds the packet of this rank, `own()` of
/// `packet_doubles(channels)`
///   doubles; an empty one has a count of zero.
/// - `all(world)` is where the packets of all ranks are gathered, and
///   `settle(stream, shape, world, options, running, name)` merges them, keeps the means, inverse
///   deviations and count for `normalise` and backward, and updates the running statistics (not if
///   the count is zero). Where the host knows that the count is one, it refuses.
/// - `measure_alone(stream, shape, x, options, running)` does both for one rank, which has another
///   number of values than one.
/// - `settle_from_running(stream, shape, options, running)` keeps these instead, for an evaluation.
/// - `normalise<Fusion>(stream, shape, x, affine, residual, y)`:
///   y = (x - mean) * (weight * inverse deviation) + bias, + residual, ReLU, rounded once.
/// - `reduce_backward<Fusion>(stream, shape, x, y, dy, affine, gradients, dresidual)`: with g = dy
///   where forward's ReLU let the value pass, and else 0, finds this rank's `sums()`: sum of g of
///   every channel, then sum of g * (x - mean) of every channel; writes the gradients from them.
///   With `relu` the mask is recomputed from x as forward rounded it (y is null); with `add_relu`
///   it is y's, and g is written to dresidual, which may be dy. Without ReLU y and dresidual are
///   null.
/// - `sums()` are 2 * channels doubles, which are then summed over ranks.
/// - `input_gradient<Fusion>(stream, shape, x, dy, affine, dx)`: dx = (g - sum(g) / count -
///   (x - mean) * inverse deviation^2 * sum(g * (x - mean)) / count) * weight * inverse deviation,
///   where count is that of all ranks. dx may be dy. Called with `none` after `add_relu`, with
///   dresidual as dy.
template <class Memory>
class NormWork {
  static_assert(sizeof(Memory) == 0,
                "lockstep: a norm in a GPU's memory needs lockstep.cuh or nccl.cuh; include it "
                "instead of lockstep.hpp");
};

/// A layer norm's, over the `features` of each of `rows` rows.
///
/// - `forward<Keeps>(stream, rows, features, eps, x, affine, y)`:
///   y = (x - mean) * inverse deviation * weight + bias, where mean and deviation are the row's.
///   `Keeps`: they are kept for backward.
/// - `backward(stream, rows, features, x, dy, affine, gradients, dx)`: with g = dy * weight,
///   dx = (g - mean of g - (x - mean) * inverse deviation^2 * mean of g * (x - mean)) * inverse
///   deviation. dx may be dy.
template <class Memory>
class LayerNormWork {
  static_assert(sizeof(Memory) == 0,
                "lockstep: a norm in a GPU's memory needs lockstep.cuh or nccl.cuh; include it "
                "instead of lockstep.hpp");
};

}  // namespace lockstep::detail
