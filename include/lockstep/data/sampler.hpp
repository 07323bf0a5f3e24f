// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The sampler axis: which samples a rank sees, what happens when they do not divide, and in
/// which order they come.

#include <cstddef>
#include <string_view>

#include "lockstep/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Sampler {
  static constexpr std::string_view name = "Sampler";
};
struct Remainder {
  static constexpr std::string_view name = "Remainder";
};
struct Order {
  static constexpr std::string_view name = "Order";
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

/// Samples that do not divide evenly are left out of the epoch.
struct DropLast : Choice<axes::Remainder> {
  static constexpr std::string_view name = "DropLast";
};

/// Every sample is drawn once; ranks may differ by one draw.
struct Exact : Choice<axes::Remainder> {
  static constexpr std::string_view name = "Exact";
};

/// Ranks draw equally many samples; the duplicates that this needs have weight 0.
struct Masked : Choice<axes::Remainder> {
  static constexpr std::string_view name = "Masked";
};

/// The permutation PyTorch makes, sample for sample. Every rank computes all of it and keeps its
/// share.
struct TorchShuffle : Choice<axes::Order> {
  static constexpr std::string_view name = "TorchShuffle";
};

/// A keyed bijection: no memory, no start-up time, any number of samples.
struct KeyedShuffle : Choice<axes::Order> {
  static constexpr std::string_view name = "KeyedShuffle";
};

/// For disks that want to be read in sequence: blocks of so many neighbouring samples are shuffled,
/// and the samples of so many blocks at a time among each other. `BlockShuffle<4096, 16>` draws
/// from 16 pieces of 4,096 samples until they are used up. No memory, any number of samples.
template <std::size_t Block, std::size_t Window>
struct BlockShuffle : Choice<axes::Order> {
  static_assert(Block != 0 && Window != 0,
                "lockstep: BlockShuffle<Block, Window> needs blocks of one sample or more and "
                "windows of one block or more; write BlockShuffle<4096, 16>, say");
  static constexpr std::string_view name = "BlockShuffle";
  static constexpr void fingerprint(detail::Hash& hash) { hash.number(Block).number(Window); }
};

/// Samples come in the order of the data set.
struct InOrder : Choice<axes::Order> {
  static constexpr std::string_view name = "InOrder";
};

/// The policy that says which samples a rank sees: `Sampler<Distributed, DropLast>`.
template <class Scheme, class Rest = Padding, class Sequence = TorchShuffle>
struct Sampler : detail::ChoicePolicy<axes::Sampler, Scheme> {
  using remainder = Rest;
  using order = Sequence;
  static constexpr bool well_formed = detail::ChoiceOf<Scheme, axes::Sampler> &&
                                      detail::ChoiceOf<Rest, axes::Remainder> &&
                                      detail::ChoiceOf<Sequence, axes::Order>;
  static constexpr bool built() { return Scheme::built && Rest::built && Sequence::built; }
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Sampler::name).text(Scheme::name).text(Rest::name);
    detail::add_choice<Sequence>(hash);
  }
};

}  // namespace lockstep
