// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The activations that a norm is given: which views it takes, and their shapes.

#include <cstddef>
#include <string_view>
#include <type_traits>

#include "lockstep/bucket/bare_step.hpp"
#include "lockstep/bucket/write_gradient.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/utility.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/norm/norm_work.hpp"
#include "lockstep/norm/refusals.hpp"

namespace lockstep::detail {

template <class V, class Memory>
inline constexpr bool is_view_in = false;
template <class Memory, class T, std::size_t... E>
inline constexpr bool is_view_in<View<Memory, T, E...>, Memory> = true;

/// Says in words which views a layer does not take. Returns whether it takes them.
template <class Memory, class X, class... Others>
consteval bool require_norm_views() {
  constexpr bool views = is_view<X> && (is_view<Others> && ...);
  static_assert(views,
                "lockstep: a norm takes views: HostView<const float, dynamic, 64> x(data, rows)");
  if constexpr (views) {
    constexpr bool near = is_view_in<X, Memory> && (is_view_in<Others, Memory> && ...);
    static_assert(near,
                  "lockstep: a norm's views are of the memory of its step: HostView in a job on "
                  "the CPU, DeviceView in one on a GPU");
    constexpr bool alike =
        (std::is_same_v<typename X::value_type, typename Others::value_type> && ...) &&
        ((X::rank() == Others::rank()) && ...);
    static_assert(alike, "lockstep: the views that a norm is given have one element type and rank");
    constexpr bool floating = FloatingElement<typename X::value_type>;
    static_assert(floating,
                  "lockstep: a norm's activations are of float, double, Half or BFloat16");
    return near && alike && floating;
  } else {
    return false;
  }
}

/// Says in words that an extent which the compiler knows is not that of the layer's features.
template <std::size_t Given, std::size_t Features>
consteval bool require_features() {
  constexpr bool fits = Given == Features || Given == dynamic || Features == dynamic;
  static_assert(fits,
                "lockstep: a norm is given a tensor with another number of channels than it has "
                "features; they are the second extent of a batch norm's, the last of a layer "
                "norm's");
  return fits;
}

/// Throws unless all views have the extents of the first.
template <class X, class... Others>
void require_equal_shapes(std::string_view layer, const X& x, const Others&... others) {
  bool same = true;
  for (std::size_t axis = 0; axis != X::rank(); ++axis)
    same = same && ((others.extent(axis) == x.extent(axis)) && ...);
  if (!same) [[unlikely]]
    refuse_shapes(layer);
}

/// Throws if the output of a training step lies where its input does, which backward reads.
template <class X, class Y>
void require_input_kept(std::string_view layer, const X& x, const Y& y) {
  if (x.size() != 0 && x.data_handle() == y.data_handle()) [[unlikely]]
    refuse_same_memory(layer, "x and y", "give y memory of its own: backward reads x");
}

/// A view of rank 2, 3 or 4 as samples of channels.
template <class X>
NormShape channel_shape(std::string_view layer, const X& x, std::size_t features) {
  NormShape shape{x.extent(0), x.extent(1), 1};
  for (std::size_t axis = 2; axis < X::rank(); ++axis) shape.positions *= x.extent(axis);
  if (shape.channels != features) [[unlikely]]
    refuse_features(layer, shape.channels, features);
  return shape;
}

/// The rows of a view: all axes but the last.
template <class X>
std::size_t leading_rows(const X& x) {
  std::size_t rows = 1;
  for (std::size_t axis = 0; axis + 1 < X::rank(); ++axis) rows *= x.extent(axis);
  return rows;
}

/// Where the gradients of weight and bias are written. A frozen one has none.
template <class Weight, class Bias, class Step>
auto affine_gradients(Step& step) {
  NormAffineGradients<typename decltype(step.param(Weight{}))::value_type> to;
  if constexpr (trains<Step>(Weight{})) to.weight = step.grad(Weight{}).data_handle();
  if constexpr (trains<Step>(Bias{})) to.bias = step.grad(Bias{}).data_handle();
  return to;
}
/// Says that they are written, the last one first.
template <class Weight, class Bias, class Step>
void say_ready(Step& step) {
  if constexpr (trains<Step>(Bias{})) step.ready(Bias{});
  if constexpr (trains<Step>(Weight{})) step.ready(Weight{});
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
      refuse_backward(layer);
  }

 private:
  TypedStorage kept_;
  NormShape shape_;
};

}  // namespace lockstep::detail
