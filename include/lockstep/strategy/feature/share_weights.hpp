// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Weights of DP's shares, which can differ in size.

#include <cstddef>

#include "lockstep/strategy/features.hpp"

namespace lockstep::detail {

/// Multiplies this rank's gradients before they are averaged over ranks.
class ShareWeights : public Stages<ShareWeights> {
 public:
  constexpr explicit ShareWeights(const auto& /*gradients*/) {}

  /// The gradients of later passes count `weight` times. Weights have a mean of 1 over ranks.
  void weigh(double weight) { weight_ = weight; }

  template <class T>
  void gradient_ready(auto& gradients, std::size_t parameter) {
    if (weight_ != 1)
      gradients.execution().scale(gradients.template written<T>(parameter), weight_);
  }

 private:
  double weight_ = 1;
};

struct ShareWeightsFeature {
  template <class Traits>
  static constexpr bool applies = Traits::weighs_shares;
  template <class Traits, class Comm>
  using type = ShareWeights;
};

}  // namespace lockstep::detail
