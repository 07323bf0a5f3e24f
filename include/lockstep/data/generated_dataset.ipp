// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `generated_dataset.hpp`.

#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/core/mix_bits.hpp"
#include "lockstep/data/generated_dataset.hpp"

namespace lockstep {

LOCKSTEP_INLINE ImageDataset generated_dataset(const std::string& split,
                                               const GeneratedOptions& options) {
  if (options.classes == 0 || options.classes > 256)
    detail::fail("generated_dataset", {options.classes, " classes"},
                 "labels are bytes: ask for 1 to 256 classes");
  const std::uint64_t of_patterns = detail::mix_bits(options.seed.value());
  const std::uint64_t of_labels = detail::mix_bits(of_patterns ^ detail::hash_of(split));
  const std::uint64_t of_noise = detail::mix_bits(of_labels);
  constexpr std::uint32_t strength = 30;  // of 256: the nearest pattern is right 19 times in 20

  std::vector<std::uint8_t> patterns(options.classes * options.width);
  for (std::size_t i = 0; i != patterns.size(); ++i)
    patterns[i] = static_cast<std::uint8_t>(detail::random_at(of_patterns, i));
  std::vector<std::uint8_t> pixels(options.samples * options.width);
  std::vector<std::uint8_t> labels(options.samples);
  std::uint64_t noise = 0;  // eight bytes at a time
  for (std::size_t i = 0, at = 0; i != options.samples; ++i) {
    labels[i] = static_cast<std::uint8_t>(detail::random_at(of_labels, i) % options.classes);
    const std::uint8_t* const pattern = patterns.data() + labels[i] * options.width;
    for (std::size_t j = 0; j != options.width; ++j, ++at, noise >>= 8) {
      if (at % 8 == 0) noise = detail::random_at(of_noise, at / 8);
      pixels[at] = static_cast<std::uint8_t>(
          (strength * pattern[j] + (256 - strength) * static_cast<std::uint8_t>(noise)) >> 8);
    }
  }
  return {std::move(pixels), std::move(labels), options.classes, options.normalization,
          "generated_dataset"};
}

}  // namespace lockstep
