// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A generated classification problem, which is the same on every platform.

#include <cstddef>
#include <string>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/data/image_dataset.hpp"

namespace lockstep {

/// The shape of a generated data set; by default that of Fashion-MNIST.
struct GeneratedOptions {
  std::size_t samples = 60'000;
  std::size_t width = 784;
  std::size_t classes = 10;
  Seed seed{0};
  Normalization normalization{};
};

/// Every class has a pattern; a sample is its class's pattern, dimmed, under noise. The splits (any
/// two names) share the patterns and differ in their samples, so that a model trained on one can be
/// tested on the other.
ImageDataset generated_dataset(const std::string& split, const GeneratedOptions& options = {});

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/generated_dataset.ipp"
#endif
