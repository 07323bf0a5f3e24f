// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `LayerNorm`, which normalises every row by itself.

#include <cstddef>
#include <type_traits>
#include <utility>

#include "lockstep/core/element.hpp"
#include "lockstep/core/name.hpp"
#include "lockstep/model/declaration.hpp"
#include "lockstep/norm/host_layer_norm.hpp"
#include "lockstep/norm/work.hpp"

namespace lockstep {

/// `LayerNorm<"ln1", 768> norm1{{.eps = 1e-6}};`
struct LayerNormOptions {
  /// It is added to the variance.
  double eps = 1e-5;
};

/// Normalises the last axis (Ba, Kiros and Hinton, 2016), as PyTorch's `nn.LayerNorm` of one extent
/// does: training and evaluation are alike, and ranks need nothing of each other. It stands in a
/// model's `ParameterList` and is a member of the model:
///
///     using Norm1 = LayerNorm<"ln1", 768>;
///     using Parameters = ParameterList<..., Norm1, ...>;  // ln1.weight, ln1.bias
///     Norm1 norm1;
///
/// `Text`, `Features` and T are as in `BatchNorm`. Activations are views of rank 2 or more, whose
/// last extent are the features.
template <Name Text, std::size_t Features, FloatingElement T = float>
class LayerNorm : public detail::NormLayer<Text, Features, T> {
  using Base = detail::NormLayer<Text, Features, T>;
  using Base::affine, Base::memory_, Base::name;
  using typename Base::Bias, typename Base::Weight;

 public:
  using typename Base::Parameters;

  LayerNorm() = default;
  explicit LayerNorm(const LayerNormOptions& options) : options_(options) {}

  /// The shapes of its tensors, in a model's `shapes`: `Norm1::shapes(shape, features)`.
  static void shapes(auto& shape, std::size_t features) {
    shape(Weight{}, features);
    shape(Bias{}, features);
  }

  // **Host** on a CPU done when it returns; a GPU's is not waited for. **Stream** the step's.

  /// y = x, normalised, * weight + bias. In training y is not x's memory: backward reads x.
  template <class Step, class X, class Y>
  void forward(Step& step, const X& x, const Y& y) {
    if constexpr (require_call<Step, X, Y>()) {
      const std::size_t features = require_shapes(step, x, y);
      constexpr bool keeps = std::remove_cvref_t<Step>::is_training();
      if constexpr (keeps) {
        detail::require_apart(name, x, y, detail::NormFault::input);
        memory_.keep({detail::leading_rows(x), features});
      }
      memory_.template get<WorkOf<Step>>().template forward<keeps>(
          detail::stream_of(step), detail::leading_rows(x), features, options_.eps, x.data_handle(),
          affine(step), y.data_handle());
    }
  }

  /// Writes dx, which may be dy's memory, and the gradients of weight and bias, and says that these
  /// are ready. x is what forward got.
  template <class Step, class X, class DY, class DX>
  void backward(Step& step, const X& x, const DY& dy, const DX& dx) {
    static_assert(std::remove_cvref_t<Step>::is_training(),
                  "lockstep: backward of a norm belongs to a training step");
    if constexpr (require_call<Step, X, DY, DX>()) {
      const std::size_t features = require_shapes(step, x, dy, dx);
      memory_.require_kept(name, {detail::leading_rows(x), features});
      memory_.template get<WorkOf<Step>>().backward(
          detail::stream_of(step), detail::leading_rows(x), features, x.data_handle(),
          dy.data_handle(), affine(step), Base::affine_gradients(step), dx.data_handle());
      Base::say_ready(step);
    }
  }

 private:
  /// Says in words why a call of this layer cannot be compiled. Returns whether it can.
  template <class Step, class X, class... Others>
  static consteval bool require_call() {
    using Scale = typename Base::template WeightView<Step>;
    if constexpr (!detail::is_view<Scale>) {
      return false;  // the step has said that the model does not declare it
    } else if constexpr (detail::require_norm_views<typename Scale::memory, X, Others...>()) {
      static_assert(X::rank() >= 2,
                    "lockstep: a layer norm takes views of rank 2 or more, whose last extent are "
                    "its features");
      if constexpr (X::rank() >= 2) {
        return detail::require_features<X::static_extent(X::rank() - 1), Features>();
      } else {
        return false;
      }
    } else {
      return false;
    }
  }

  template <class Step, class X, class... Others>
  static std::size_t require_shapes(Step& step, const X& x, const Others&... others) {
    const std::size_t features = step.param(Weight{}).extent(0);
    if (x.extent(X::rank() - 1) != features) [[unlikely]]
      detail::refuse_norm(name, detail::NormFault::features, x.extent(X::rank() - 1), features);
    detail::require_equal_shapes(name, x, others...);
    return features;
  }

  template <class Step>
  using WorkOf = detail::LayerNormWork<typename Base::template WeightView<Step>::memory>;

  LayerNormOptions options_;
};

}  // namespace lockstep
