// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `PowerSGD<Rank>`: gradients travel as products of narrow matrices.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

#include "lockstep/core/element.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/hook/hook.hpp"
#include "lockstep/hook/low_rank.hpp"

namespace lockstep {

/// PyTorch's numbers: `PowerSGD<2, PowerSgdOptions{.start = 100}>`.
struct PowerSgdOptions {
  /// So many steps are reduced without compression first. Early gradients are the ones that suffer
  /// most from it.
  std::uint64_t start = 1000;
  /// A gradient is compressed where that saves more than this factor.
  double least_compression = 2;
  /// Is what was not sent added to the next gradient?
  bool error_feedback = true;
  /// Does a step begin with the Q of the step before?
  bool warm_start = true;
  /// Is added to the norm by which Gram and Schmidt's method divides.
  double epsilon = 0;
  std::uint64_t seed = 0;
};

/// Gradients of matrices travel as P and Q of `Rank` columns each (Vogels, Karimireddy, Jaggi 2019,
/// arXiv:1905.13727), those of vectors and small matrices as they are: PyTorch's `powerSGD_hook`. A
/// step has two rounds; the first also has the whole tensors.
template <std::size_t Rank = 1, PowerSgdOptions Options = PowerSgdOptions{}>
struct PowerSGD {
  static constexpr std::string_view name = "PowerSGD";
  static constexpr bool well_formed =
      Rank > 0 && Options.least_compression >= 0 && Options.epsilon >= 0;
  static constexpr std::size_t rounds = 2;
  static constexpr bool is_alone_of_its_kind = true;
  /// Steps before and after the start.
  static constexpr std::uint64_t phase(std::uint64_t step) {
    return detail::has_begun<Options.start>(step) ? 1 : 0;
  }
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.number(Rank).number(Options.start).number(Options.seed);
    hash.number(__builtin_bit_cast(std::uint64_t, Options.least_compression));
    hash.number(__builtin_bit_cast(std::uint64_t, Options.epsilon));
    hash.number(Options.error_feedback ? 1 : 0).number(Options.warm_start ? 1 : 0);
  }

  template <class T, class Device>
  class Bucket {
   public:
    explicit Bucket(auto& bucket)
        : step_(bucket.step()),
          count_(bucket.count()),
          passes_(bucket.device(), make_plan(bucket.tensors())),
          first_(bucket.template allocate<T>(compresses() ? passes_.plan().first_round() : 0)),
          second_(bucket.template allocate<T>(passes_.plan().q_count)) {}

    void begin(std::span<T> values, auto& next) {
      under_way_ = compresses() && detail::has_begun<Options.start>(step_);
      if (!under_way_) return next.begin(values);
      if constexpr (!Options.warm_start) passes_.forget_q();
      passes_.project(values, first_, step_);
      next.begin(first_);
    }
    void finish(std::span<T> values, auto& next) {
      if (!under_way_) return next.finish(values);
      next.finish(first_);
      passes_.project_back(values, first_, second_);
      next.begin(second_);
      next.finish(second_);
      passes_.restore(values, first_, second_);
    }

    /// In the first steps that is the bucket itself.
    std::size_t most_sent() const { return std::max({count_, first_.size(), second_.size()}); }

    /// Residuals are each rank's own; Q is the same on all.
    void for_each_kept(const auto& f) {
      for (const detail::LowRankMatrix& matrix : passes_.plan().matrices) {
        if constexpr (Options.error_feedback)
          f(matrix.parameter, "PowerSGD.residual", passes_.residual_of(matrix),
            detail::Keeper::each_rank);
        if constexpr (Options.warm_start)
          f(matrix.parameter, "PowerSGD.q", passes_.q_of(matrix), detail::Keeper::all_ranks);
      }
    }

   private:
    bool compresses() const { return !passes_.plan().matrices.empty(); }

    static detail::LowRankPlan make_plan(std::span<const HookedTensor> tensors) {
      detail::LowRankPlan plan;
      plan.epsilon = Options.epsilon;
      plan.feedback = Options.error_feedback;
      plan.seed = Options.seed;
      for (const HookedTensor& tensor : tensors) {
        const std::size_t rank = std::min({Rank, tensor.rows, tensor.columns});
        const auto compressed = static_cast<double>((tensor.rows + tensor.columns) * rank);
        if (compressed * Options.least_compression < static_cast<double>(tensor.count())) {
          plan.matrices.push_back({tensor.parameter, tensor.first, tensor.rows, tensor.columns,
                                   rank, plan.p_count, plan.q_count, plan.residual_count});
          plan.p_count += tensor.rows * rank;
          plan.q_count += tensor.columns * rank;
          plan.residual_count += tensor.count();
        } else {
          plan.whole.push_back({tensor.first, tensor.count(), plan.whole_count});
          plan.whole_count += tensor.count();
        }
      }
      return plan;
    }

    const std::uint64_t& step_;
    std::size_t count_;
    detail::LowRank<T, Device> passes_;
    std::span<T> first_;   // whole tensors and P
    std::span<T> second_;  // Q
    bool under_way_ = false;
  };
};

}  // namespace lockstep
