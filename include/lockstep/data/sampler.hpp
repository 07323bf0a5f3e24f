// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The sampler axis: which samples a rank sees, and what happens when they do not divide.

#include <string_view>

#include "lockstep/core/choice.hpp"

namespace lockstep {

namespace axes {
struct Sampler {
  static constexpr std::string_view name = "Sampler";
};
struct Remainder {
  static constexpr std::string_view name = "Remainder";
};
}  // namespace axes

/// Rank r of W takes every W-th sample from the r-th on, as PyTorch's DistributedSampler does.
struct Distributed : Choice<axes::Sampler> {
  static constexpr std::string_view name = "Distributed";
};

/// Samples from the front fill up the last round: PyTorch's default. Biases evaluation.
struct Padding : Choice<axes::Remainder> {
  static constexpr std::string_view name = "Padding";
};

/// What does not divide is left out of the epoch.
struct DropLast : Choice<axes::Remainder> {
  static constexpr std::string_view name = "DropLast";
};

/// Every sample once; ranks may differ by one.
struct Exact : Choice<axes::Remainder> {
  static constexpr std::string_view name = "Exact";
};

/// Padded to equal length, with weight 0 for the duplicates.
struct Masked : Choice<axes::Remainder> {
  static constexpr std::string_view name = "Masked";
};

template <class Scheme, class Rest = Padding>
struct Sampler : ChoicePolicy<axes::Sampler, Scheme> {
  using remainder = Rest;
  static constexpr bool well_formed =
      ChoiceOf<Scheme, axes::Sampler> && ChoiceOf<Rest, axes::Remainder>;
  static constexpr bool built() { return Scheme::built && Rest::built; }
  static constexpr void fingerprint(Hash& hash) {
    hash.text(axes::Sampler::name).text(Scheme::name).text(Rest::name);
  }
};

}  // namespace lockstep
