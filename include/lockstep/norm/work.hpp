// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a norm asks of the memory that it works in: `NormWork<HostMemory>` is in
/// host_norm.hpp, `LayerNormWork<HostMemory>` in layer_norm.hpp, a GPU's in device_norm.cuh
/// and device_layer_norm.cuh; and which views it takes, and the errors about them.

#include "lockstep/bucket/step.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/name.hpp"
#include "lockstep/core/utility.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/model/declaration.hpp"

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

/// What can be wrong with a call of a norm.
enum class NormFault : std::uint8_t {
  features,  ///< a tensor has another extent than the layer has features
  shapes,    ///< views of a layer have different shapes
  backward,  ///< there was no forward pass of this shape
  input,     ///< the output lies where backward reads the input
  residual,  ///< the gradients of input and residual are the same memory
  values     ///< a channel has one value, whose variance trains nothing
};
/// Throws its error. For `features`, `given` are there and `wanted` should be.
[[noreturn, gnu::cold]] void refuse_norm(std::string_view layer, NormFault fault,
                                         std::size_t given = 0, std::size_t wanted = 0);

/// The memory of a step's tensors.
template <class Step>
using StepMemory =
    std::conditional_t<requires(Step& step) { step.stream(); }, DeviceMemory, HostMemory>;

/// Says in words which views a layer does not take. Returns whether it takes them.
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

/// Says in words that views of a norm have different ranks, or that their extent `Given`, where the
/// compiler knows it, is not that of the layer's features.
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

/// Throws unless all views have the extents of the first.
template <class X, class... Others>
void require_equal_shapes(std::string_view layer, const X& x, const Others&... others) {
  bool same = true;
  for (std::size_t axis = 0; axis != X::rank(); ++axis)
    same = same && ((others.extent(axis) == x.extent(axis)) && ...);
  if (!same) [[unlikely]]
    refuse_norm(layer, NormFault::shapes);
}

/// Throws if the memory of two views is the same.
template <class X, class Y>
void require_apart(std::string_view layer, const X& x, const Y& y, NormFault fault) {
  if (x.size() != 0 && x.data_handle() == y.data_handle()) [[unlikely]]
    refuse_norm(layer, fault);
}

/// A view of rank 2, 3 or 4 as samples of channels.
template <class X>
NormShape channel_shape(std::string_view layer, const X& x, std::size_t features) {
  NormShape shape{x.extent(0), x.extent(1), 1};
  for (std::size_t axis = 2; axis < X::rank(); ++axis) shape.positions *= x.extent(axis);
  if (shape.channels != features) [[unlikely]]
    refuse_norm(layer, NormFault::features, shape.channels, features);
  return shape;
}

/// The rows of a view: all axes but the last.
template <class X>
std::size_t leading_rows(const X& x) {
  std::size_t rows = 1;
  for (std::size_t axis = 0; axis + 1 < X::rank(); ++axis) rows *= x.extent(axis);
  return rows;
}

/// The stream of a step.
template <class Step>
auto stream_of([[maybe_unused]] const Step& step) {
  if constexpr (requires { step.stream(); }) {
    return step.stream();
  } else {
    return HostStream{};
  }
}

/// What a layer keeps from forward to backward, in the memory of its steps. The copy of a layer
/// belongs to another replica and begins with nothing.
class LayerMemory {
 public:
  LayerMemory() = default;
  LayerMemory(const LayerMemory&) {}
  LayerMemory& operator=(const LayerMemory& other) {
    if (this != &other) *this = LayerMemory();
    return *this;
  }
  LayerMemory(LayerMemory&&) = default;
  LayerMemory& operator=(LayerMemory&&) = default;
  ~LayerMemory() = default;

  template <class Work>
  Work& get() {
    return kept_.get<Work>();
  }

  /// Forward has kept the statistics of a tensor of this shape; of none if it has no channels.
  void keep(const NormShape& shape) { shape_ = shape; }
  /// Throws unless backward's tensor has the shape of the one that forward was given.
  void require_kept(std::string_view layer, const NormShape& shape) const {
    if (shape != shape_) [[unlikely]]
      refuse_norm(layer, NormFault::backward);
  }

 private:
  TypedStorage kept_;
  NormShape shape_;
};

/// What norms have in common: weight and bias, and what forward keeps.
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

 protected:
  static constexpr std::string_view name = Text.view();

  template <class Step>
  static auto affine(Step& step) {
    return NormAffine{step.param(Weight{}).data_handle(), step.param(Bias{}).data_handle()};
  }
  /// Where the gradients of weight and bias are written. A frozen one has none.
  template <class Step>
  static auto affine_gradients(Step& step) {
    NormAffineGradients<typename WeightView<Step>::value_type> to;
    if constexpr (trains<Step>(Weight{})) to.weight = step.grad(Weight{}).data_handle();
    if constexpr (trains<Step>(Bias{})) to.bias = step.grad(Bias{}).data_handle();
    return to;
  }
  /// Says that they are written, the last one first.
  template <class Step>
  static void say_ready(Step& step) {
    if constexpr (trains<Step>(Bias{})) step.ready(Bias{});
    if constexpr (trains<Step>(Weight{})) step.ready(Weight{});
  }

  LayerMemory memory_;
};

}  // namespace lockstep::detail
