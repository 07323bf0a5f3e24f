// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What is done to every image: a random crop of 28 x 28 pixels out of the image with two
/// pixels of zeros around it, and a flip of every other one.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lockstep/detail/data/pipeline.hpp"

namespace bench {

/// `random.below(n)` draws a number below n.
template <class Random>
void augment(std::span<const float> image, std::span<float> out, Random& random) {
  constexpr std::ptrdiff_t side = 28;
  constexpr std::ptrdiff_t padding = 2;
  const auto shift = [&] {
    return static_cast<std::ptrdiff_t>(random.below(2 * padding + 1)) - padding;
  };
  const std::ptrdiff_t down = shift();
  const std::ptrdiff_t right = shift();
  const bool flips = random.below(2) == 1;
  for (std::ptrdiff_t y = 0; y != side; ++y) {
    const auto row = out.subspan(static_cast<std::size_t>(y * side), side);
    const std::ptrdiff_t from = y + down;
    if (from < 0 || from >= side) {
      std::fill(row.begin(), row.end(), 0.f);
      continue;
    }
    const float* const source = image.data() + from * side;
    const std::ptrdiff_t first = std::max<std::ptrdiff_t>(0, -right);
    const std::ptrdiff_t last = std::min(side, side - right);
    std::fill(row.begin(), row.begin() + first, 0.f);
    std::copy(source + first + right, source + last + right, row.begin() + first);
    std::fill(row.begin() + last, row.end(), 0.f);
    if (flips) std::reverse(row.begin(), row.end());
  }
}

/// The same as a stage of a pipeline.
inline auto augmenting() {
  using Image = lockstep::OwnedSample<float, std::int32_t>;
  return lockstep::map<Image>([](const auto& sample, Image& out, lockstep::RandomStream& random) {
    out.inputs.resize(sample.inputs.size());
    augment(sample.inputs, out.inputs, random);
    out.label = sample.label;
  });
}

}  // namespace bench
