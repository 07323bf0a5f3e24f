// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `LayerNorm`, which normalises every row by itself, and its passes on the host.

#include "lockstep/detail/norm/host_sums.hpp"
#include "lockstep/detail/norm/work.hpp"

namespace lockstep::detail {

template <>
class LayerNormWork<HostMemory> {
 public:
  LayerNormWork() = default;

  template <bool Keeps, class T, class W>
  void forward(HostStream, std::size_t rows, std::size_t features, double eps, const T* x,
               const NormAffine<const W>& affine, T* y) {
    using A = Accumulator<T>;
    const A* const weight = widened<A>(affine.weight, features, 0);
    const A* const bias = widened<A>(affine.bias, features, 1);
    if constexpr (Keeps) saved_.resize(rows);
    for (std::size_t row = 0; row != rows; ++row, x += features, y += features) {
      const Moments moments = run_moments(x, features);
      const double inverse = inverse_deviation(moments.m2 / static_cast<double>(features), eps);
      if constexpr (Keeps) saved_[row] = {moments.mean, inverse};
      const SplitMean<A> mean(moments.mean);
      const A scale = static_cast<A>(inverse);
#pragma GCC ivdep
      for (std::size_t i = 0; i != features; ++i)
        y[i] = static_cast<T>(mean.deviation(static_cast<A>(x[i])) * scale * weight[i] + bias[i]);
    }
  }

  template <class T, class W, class G>
  void backward(HostStream, std::size_t rows, std::size_t features, const T* x, const T* dy,
                const NormAffine<const W>& affine, const NormAffine<G>& gradients, T* dx) {
    using A = Accumulator<T>;
    const A* const weight = widened<A>(affine.weight, features, 0);
    A* const weights = widened<A>(static_cast<const W*>(nullptr), features, 1);
    A* const biases = widened<A>(static_cast<const W*>(nullptr), features, 2);
    sums_.assign(2 * features, 0.0);
    const double share = 1 / static_cast<double>(features);
    for (std::size_t first = 0; first < rows; first += rows_at_a_time) {
      // Sums of a few rows use the activations' precision, those of all rows double.
      std::fill_n(weights, features, A(0));
      std::fill_n(biases, features, A(0));
      const std::size_t last = std::min(rows, first + rows_at_a_time);
      for (std::size_t row = first; row != last;
           ++row, x += features, dy += features, dx += features) {
        const SplitMean<A> mean(saved_[row].mean);
        const double inverse = saved_[row].inverse;
        const TwoSums<double> sums = row_sums(x, dy, weight, features, mean);
        const A mean_gradient = static_cast<A>(sums.first * share);
        const A slope = static_cast<A>(sums.second * share * (inverse * inverse));
        const A scale = static_cast<A>(inverse);
#pragma GCC ivdep
        for (std::size_t i = 0; i != features; ++i) {
          const A deviation = mean.deviation(static_cast<A>(x[i]));
          const A g = static_cast<A>(dy[i]);
          weights[i] += g * (deviation * scale);
          biases[i] += g;
          dx[i] = static_cast<T>(((g * weight[i] - mean_gradient) - deviation * slope) * scale);
        }
      }
      for (std::size_t i = 0; i != features; ++i) {
        sums_[i] += weights[i];
        sums_[features + i] += biases[i];
      }
    }
    for (std::size_t i = 0; i != features; ++i) {
      if (gradients.weight != nullptr) gradients.weight[i] = converted<G>(sums_[i]);
      if (gradients.bias != nullptr) gradients.bias[i] = converted<G>(sums_[features + i]);
    }
  }

 private:
  static constexpr std::size_t rows_at_a_time = 64;

  /// Sums of g and of g * (x - mean) over a row.
  template <class T, class A>
  static TwoSums<double> row_sums(const T* x, const T* dy, const A* weight, std::size_t features,
                                  const SplitMean<A>& mean) {
    TwoSums<double> sums{};
    for (std::size_t first = 0; first < features; first += norm_piece) {
      const TwoSums<A> piece = lane_sums<A>(
          std::min(norm_piece, features - first), [&](std::size_t i, A& gradients, A& products) {
            const A g = static_cast<A>(dy[first + i]) * weight[first + i];
            gradients += g;
            products += g * mean.deviation(static_cast<A>(x[first + i]));
          });
      sums = sums + TwoSums<double>{piece.first, piece.second};
    }
    return sums;
  }

  /// Converts per-feature values to the accumulator type, into one of three slots.
  template <class A, class W>
  A* widened(const W* numbers, std::size_t features, std::size_t row) {
    std::vector<A>& memory = std::get<std::vector<A>>(numbers_);
    if (memory.size() < 3 * features) memory.resize(3 * features);
    A* const to = memory.data() + row * features;
    if (numbers != nullptr) {
      for (std::size_t i = 0; i != features; ++i) to[i] = converted<A>(numbers[i]);
    }
    return to;
  }

  std::vector<SavedStatistics> saved_;
  std::vector<double> sums_;
  std::tuple<std::vector<float>, std::vector<double>> numbers_;
};

}  // namespace lockstep::detail

namespace lockstep {

/// Normalises the last axis (Ba, Kiros and Hinton, 2016), like PyTorch's `nn.LayerNorm` with one
/// extent, without communication. The model lists it in its `ParameterList` and has it as a member:
///
///     using Norm1 = LayerNorm<"ln1", 768>;
///     using Parameters = ParameterList<..., Norm1, ...>;  // ln1.weight, ln1.bias
///     Norm1 norm1;
///
/// `Text`, `Features`, T: as in `BatchNorm`. Activations have rank 2 or more; features come last.
template <Name Text, std::size_t Features, FloatingElement T = float>
class LayerNorm : public detail::NormLayer<Text, Features, T> {
  using Base = detail::NormLayer<Text, Features, T>;
  using Base::affine, Base::name, Base::saved_shape_, Base::works_;
  using typename Base::Bias, typename Base::Weight;

 public:
  using typename Base::Parameters;

  LayerNorm() = default;
  /// `eps` is added to the variance: `LayerNorm<"ln1", 768> norm1{1e-6};`
  explicit LayerNorm(double eps) : eps_(eps) {}

  /// For a model's `shapes`: `Norm1::shapes(shape, features)`.
  static void shapes(auto& shape, std::size_t features) {
    shape(Weight{}, features);
    shape(Bias{}, features);
  }

  // **Host** blocks on a CPU only. **Stream** ordered on the step's.

  /// y = normalised x * weight + bias. In training, y must not be x: backward reads x.
  template <class Step, class X, class Y>
  void forward(Step& step, const X& x, const Y& y) {
    if constexpr (require_call<Step, X, Y>()) {
      const std::size_t features = require_shapes(step, x, y);
      constexpr bool keeps = std::remove_cvref_t<Step>::is_training();
      if constexpr (keeps) {
        detail::require_no_overlap(name, x, y, detail::NormFault::input);
        saved_shape_ = {detail::leading_rows(x), features};
      }
      works_.template get<WorkOf<Step>>().template forward<keeps>(
          detail::stream_of(step), detail::leading_rows(x), features, eps_, x.data_handle(),
          affine(step), y.data_handle());
    }
  }

  /// From forward's x, writes dx (may be dy) and the gradients of weight and bias, marked ready.
  template <class Step, class X, class DY, class DX>
  void backward(Step& step, const X& x, const DY& dy, const DX& dx) {
    static_assert(std::remove_cvref_t<Step>::is_training(),
                  "lockstep: backward of a norm belongs to a training step");
    if constexpr (require_call<Step, X, DY, DX>()) {
      const std::size_t features = require_shapes(step, x, dy, dx);
      Base::require_saved({detail::leading_rows(x), features});
      works_.template get<WorkOf<Step>>().backward(
          detail::stream_of(step), detail::leading_rows(x), features, x.data_handle(),
          dy.data_handle(), affine(step), Base::affine_gradients(step), dx.data_handle());
      Base::say_ready(step);
    }
  }

 private:
  /// Can this call be compiled? Fails to compile with the reason if not.
  template <class Step, class X, class... Others>
  static consteval bool require_call() {
    using Scale = typename Base::template WeightView<Step>;
    if constexpr (detail::is_view<Scale>) {  // else the step has reported it
      if constexpr (detail::require_layer_views<typename Scale::memory, X, Others...>()) {
        static_assert(X::rank() >= 2,
                      "lockstep: a layer norm takes views of rank 2 or more, whose last extent are "
                      "its features");
        if constexpr (X::rank() >= 2)
          return detail::require_features<X::static_extent(X::rank() - 1), Features, X,
                                          Others...>();
      }
    }
    return false;
  }

  template <class Step, class X, class... Others>
  static std::size_t require_shapes(Step& step, const X& x, const Others&... others) {
    const std::size_t features = step.param(Weight{}).extent(0);
    if (x.extent(X::rank() - 1) != features) [[unlikely]]
      detail::reject_norm(name, detail::NormFault::features, x.extent(X::rank() - 1), features);
    detail::require_equal_shapes(name, x, others...);
    return features;
  }

  template <class Step>
  using WorkOf = detail::LayerNormWork<typename Base::template WeightView<Step>::memory>;

  double eps_ = 1e-5;
};

}  // namespace lockstep
