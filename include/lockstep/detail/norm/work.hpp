// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The interface of a norm's passes in a kind of memory, the checks of views, and its errors.

#include "lockstep/detail/bucket/step.hpp"
#include "lockstep/detail/core/utility.hpp"

namespace lockstep::detail {

/// Passes fused with the normalisation.
enum class Fusion : std::uint8_t { none, relu, add_relu };

/// Samples of channels with contiguous positions; matrices and channels-last images have one.
struct NormShape {
  std::size_t samples = 0;
  std::size_t channels = 0;
  std::size_t positions = 1;

  /// Values per channel.
  LOCKSTEP_HOST_DEVICE constexpr std::size_t count() const { return samples * positions; }
  LOCKSTEP_HOST_DEVICE constexpr std::size_t size() const { return count() * channels; }
  constexpr bool operator==(const NormShape&) const = default;
};

/// Weight and bias, or their gradients, which are null if frozen.
template <class W>
struct NormAffine {
  W* weight = nullptr;
  W* bias = nullptr;
};

template <class R>
struct NormRunning {
  R* mean = nullptr;
  R* variance = nullptr;
  std::int64_t* batches = nullptr;
};

/// The host's stream: every pass completes before it returns.
struct HostStream {};

/// One batch norm's statistics, in doubles, and the passes over its activations of type T, which a
/// pass reads and writes once, enqueued on `stream`. A copy is a fresh object.
///
/// - `bool reserve(channels, world)` allocates; true if it had to. Called first in every forward.
/// - `measure(stream, shape, x)` computes this rank's packet, `own()` of `packet_doubles(channels)`
///   doubles, with a count of zero for an empty batch.
/// - `finalize(stream, shape, world, options, running, name)` merges the packets of all ranks,
///   gathered in `all(world)`, stores means, inverse deviations and count for `normalise` and
///   backward, and updates the running statistics unless the count is zero. Throws if the host
///   knows that the count is one.
/// - `measure_alone(stream, shape, x, options, running)`: both for one rank; the count is not 1.
/// - `finalize_from_running(stream, shape, options, running)`: from running statistics.
/// - `normalise<Fusion>(stream, shape, x, affine, residual, y)`:
///   y = (x - mean) * (weight * inverse deviation) + bias, + residual, ReLU, rounded once.
/// - `reduce_backward<Fusion>(stream, shape, x, y, dy, affine, gradients, dresidual)`: with g = dy
///   where ReLU passed the value, else 0, computes `sums()` and the gradients of weight and bias.
///   `relu` recomputes the mask from x as forward rounded it (y is null); `add_relu` takes it from
///   y and writes g to dresidual, which may be dy. Without ReLU, y and dresidual are null.
/// - `sums()`: 2 * channels doubles, to be summed over ranks: each channel's sum of g, then each
///   channel's sum of g * (x - mean).
/// - `input_gradient<Fusion>(stream, shape, x, dy, affine, dx)`: dx = weight * inverse deviation *
///   (g - sum(g) / count - (x - mean) * inverse deviation^2 * sum(g * (x - mean)) / count), with
///   the count of all ranks. dx may be dy. Called with `none` and dresidual as dy after `add_relu`.
template <class Memory>
class NormWork {
  static_assert(sizeof(Memory) == 0,
                "lockstep: a norm in a GPU's memory needs lockstep.cuh or nccl.cuh; include it "
                "instead of lockstep.hpp");
};

/// The passes of a layer norm over the `features` of each of `rows` rows.
///
/// - `forward<Keeps>(stream, rows, features, eps, x, affine, y)`: y = (x - mean) * inverse
///   deviation * weight + bias with the row's statistics, stored for backward if `Keeps`.
/// - `backward(stream, rows, features, x, dy, affine, gradients, dx)`, dx may be dy: with g = dy *
///   weight, dx = (g - mean(g) - n * mean(g * n)) * inverse deviation, n = normalised x.
template <class Memory>
class LayerNormWork {
  static_assert(sizeof(Memory) == 0,
                "lockstep: a norm in a GPU's memory needs lockstep.cuh or nccl.cuh; include it "
                "instead of lockstep.hpp");
};

enum class NormFault : std::uint8_t {
  features,  ///< a tensor's extent differs from the layer's features
  shapes,    ///< views of a layer have different shapes
  backward,  ///< there was no forward pass with this shape
  input,     ///< the output overwrites the input, which backward reads
  residual,  ///< the gradients of input and residual share memory
  values     ///< a channel has only one value, whose variance is useless in training
};
/// Throws the error of a fault. For `features`: `given` of the tensor, `wanted` by the layer.
[[noreturn, gnu::cold]] void reject_norm(std::string_view layer, NormFault fault,
                                         std::size_t given = 0, std::size_t wanted = 0);

template <class Step>
using StepMemory =
    std::conditional_t<requires(Step& step) { step.stream(); }, DeviceMemory, HostMemory>;

/// Are the views acceptable for a layer? Fails to compile with the reason if not.
template <class Memory, class X, class... Others>
consteval bool require_layer_views() {
  constexpr bool views = is_view<X> && (is_view<Others> && ...);
  static_assert(views,
                "lockstep: a layer takes views: HostView<const float, dynamic, 64> x(data, rows)");
  if constexpr (views) {
    using T = typename X::value_type;
    constexpr bool near = std::is_same_v<typename X::memory, Memory> &&
                          (std::is_same_v<typename Others::memory, Memory> && ...);
    static_assert(near,
                  "lockstep: a layer's views are of the memory of its step: HostView in a job on "
                  "the CPU, DeviceView in one on a GPU");
    constexpr bool alike = (std::is_same_v<T, typename Others::value_type> && ...);
    static_assert(alike, "lockstep: the views that a layer is given have one element type");
    static_assert(FloatingElement<T>,
                  "lockstep: a layer's activations are of float, double, Half or BFloat16");
    return near && alike && FloatingElement<T>;
  }
  return false;
}

/// Fails to compile if views have different ranks, or the extent `Given` is not `Features`.
template <std::size_t Given, std::size_t Features, class X, class... Others>
consteval bool require_features() {
  constexpr bool alike = ((X::rank() == Others::rank()) && ...);
  static_assert(alike, "lockstep: the views that a norm is given have one rank");
  constexpr bool fits = Given == Features || Given == dynamic || Features == dynamic;
  static_assert(fits,
                "lockstep: a norm is given a tensor with another number of channels than it has "
                "features; they are the second extent of a batch norm's, the last of a layer "
                "norm's");
  return alike && fits;
}

template <class X, class... Others>
void require_equal_shapes(std::string_view layer, const X& x, const Others&... others) {
  bool same = true;
  for (std::size_t axis = 0; axis != X::rank(); ++axis)
    same = same && ((others.extent(axis) == x.extent(axis)) && ...);
  if (!same) [[unlikely]]
    reject_norm(layer, NormFault::shapes);
}

/// Throws if two views start at the same address.
void require_no_overlap(std::string_view layer, const auto& x, const auto& y, NormFault fault) {
  if (x.size() != 0 && x.data_handle() == y.data_handle()) [[unlikely]]
    reject_norm(layer, fault);
}

template <class X>
NormShape channel_shape(std::string_view layer, const X& x, std::size_t features) {
  NormShape shape{x.extent(0), x.extent(1), 1};
  for (std::size_t axis = 2; axis < X::rank(); ++axis) shape.positions *= x.extent(axis);
  if (shape.channels != features) [[unlikely]]
    reject_norm(layer, NormFault::features, shape.channels, features);
  return shape;
}

/// The product of all extents but the last.
template <class X>
std::size_t leading_rows(const X& x) {
  std::size_t rows = 1;
  for (std::size_t axis = 0; axis + 1 < X::rank(); ++axis) rows *= x.extent(axis);
  return rows;
}

auto stream_of([[maybe_unused]] const auto& step) {
  if constexpr (requires { step.stream(); }) {
    return step.stream();
  } else {
    return HostStream{};
  }
}

/// Weight, bias and the state from forward to backward. A copied layer starts without state.
template <Name Text, std::size_t Features, FloatingElement T>
class NormLayer {
 protected:
  using Layer = Key<Text>;
  using Weight = decltype(Layer{} / Key<"weight">{});
  using Bias = decltype(Layer{} / Key<"bias">{});
  template <class Step>
  using WeightView = decltype(std::declval<Step&>().param(Weight{}));

 public:
  using Parameters = Scope<Text, ParameterList<StartsAtOne<Parameter<"weight", T, Features>>,
                                               Parameter<"bias", T, Features>>>;

  NormLayer() = default;
  NormLayer(const NormLayer&) {}
  NormLayer& operator=(const NormLayer& other) {
    if (this != &other) *this = NormLayer();
    return *this;
  }
  NormLayer(NormLayer&&) = default;
  NormLayer& operator=(NormLayer&&) = default;
  ~NormLayer() = default;

 protected:
  static constexpr std::string_view name = Text.view();

  template <class Step>
  static auto affine(Step& step) {
    return NormAffine<const typename WeightView<Step>::value_type>{
        step.param(Weight{}).data_handle(), step.param(Bias{}).data_handle()};
  }
  template <class Step>
  static auto affine_gradients(Step& step) {
    NormAffine<typename WeightView<Step>::value_type> to;
    if constexpr (trains<Step>(Weight{})) to.weight = step.grad(Weight{}).data_handle();
    if constexpr (trains<Step>(Bias{})) to.bias = step.grad(Bias{}).data_handle();
    return to;
  }
  /// Marks the gradients ready, the last parameter first.
  template <class Step>
  static void say_ready(Step& step) {
    if constexpr (trains<Step>(Bias{})) step.ready(Bias{});
    if constexpr (trains<Step>(Weight{})) step.ready(Weight{});
  }

  /// Throws unless backward's shape is that of the last forward.
  void require_saved(const NormShape& shape) const {
    if (shape != saved_shape_) [[unlikely]]
      reject_norm(name, NormFault::backward);
  }

  TypedStorage works_;
  NormShape saved_shape_;  // of the last forward in training; empty if there is none
};

}  // namespace lockstep::detail
