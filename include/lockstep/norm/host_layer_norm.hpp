// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Layer norms in host memory: what `LayerNormWork` describes, in vectorised loops.

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <vector>

#include "lockstep/bucket/step.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/norm/host_sums.hpp"
#include "lockstep/norm/statistics.hpp"
#include "lockstep/norm/work.hpp"

namespace lockstep::detail {

template <>
class LayerNormWork<HostMemory> {
 public:
  LayerNormWork() = default;

  template <bool Keeps, class T, class W>
  void forward(HostStream, std::size_t rows, std::size_t features, double eps, const T* x,
               const NormAffine<W>& affine, T* y) {
    using A = Accumulator<T>;
    const A* const weight = widened<A>(affine.weight, features, 0);
    const A* const bias = widened<A>(affine.bias, features, 1);
    if constexpr (Keeps) kept_.resize(rows);
    for (std::size_t row = 0; row != rows; ++row, x += features, y += features) {
      const Moments moments = run_moments(x, features);
      const double inverse = inverse_deviation(moments.m2 / static_cast<double>(features), eps);
      if constexpr (Keeps) kept_[row] = {moments.mean, inverse};
      const SplitMean<A> mean(moments.mean);
      const A scale = static_cast<A>(inverse);
#pragma GCC ivdep
      for (std::size_t i = 0; i != features; ++i)
        y[i] = static_cast<T>(mean.deviation(static_cast<A>(x[i])) * scale * weight[i] + bias[i]);
    }
  }

  template <class T, class W, class G>
  void backward(HostStream, std::size_t rows, std::size_t features, const T* x, const T* dy,
                const NormAffine<W>& affine, const NormAffineGradients<G>& gradients, T* dx) {
    using A = Accumulator<T>;
    const A* const weight = widened<A>(affine.weight, features, 0);
    A* const weights = widened<A>(static_cast<const W*>(nullptr), features, 1);
    A* const biases = widened<A>(static_cast<const W*>(nullptr), features, 2);
    sums_.assign(2 * features, 0.0);
    const double share = 1 / static_cast<double>(features);
    for (std::size_t first = 0; first < rows; first += rows_at_a_time) {
      // Sums of a few rows are kept in the activations' precision, those of all in double.
      std::fill_n(weights, features, A(0));
      std::fill_n(biases, features, A(0));
      const std::size_t last = std::min(rows, first + rows_at_a_time);
      for (std::size_t row = first; row != last;
           ++row, x += features, dy += features, dx += features) {
        const SplitMean<A> mean(kept_[row].mean);
        const double inverse = kept_[row].inverse;
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

  /// The statistics of a row.
  struct Row {
    double mean;
    double inverse;
  };

  /// Sums over a row, of g and of g * (x - mean).
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

  /// Numbers of all features in the type of sums, in one of three places.
  template <class A, class W>
  A* widened(const W* numbers, std::size_t features, std::size_t place) {
    std::vector<A>& memory = std::get<std::vector<A>>(numbers_);
    if (memory.size() < 3 * features) memory.resize(3 * features);
    A* const to = memory.data() + place * features;
    if (numbers != nullptr) {
      for (std::size_t i = 0; i != features; ++i) to[i] = converted<A>(numbers[i]);
    }
    return to;
  }

  std::vector<Row> kept_;
  std::vector<double> sums_;
  std::tuple<std::vector<float>, std::vector<double>> numbers_;
};

}  // namespace lockstep::detail
