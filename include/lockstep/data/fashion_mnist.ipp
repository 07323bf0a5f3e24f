// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `fashion_mnist.hpp`.

#include "lockstep/data/fashion_mnist.hpp"
#include "lockstep/data/generated_dataset.hpp"
#include "lockstep/data/idx_dataset.hpp"

namespace lockstep {

LOCKSTEP_INLINE ImageDataset fashion_mnist(const std::string& split, const std::string& source,
                                           Normalization normalization) {
  if (source != "generated") {
    return idx_dataset(split, {.normalization = normalization, .folder = source});
  }
  GeneratedOptions options;
  options.samples = split == "train" ? 60'000 : 10'000;
  options.normalization = normalization;
  return generated_dataset(split, options);
}

}  // namespace lockstep
