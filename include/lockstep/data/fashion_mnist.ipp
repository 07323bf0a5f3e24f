// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `fashion_mnist.hpp`.

#include <cstdio>

#include "lockstep/data/fashion_mnist.hpp"
#include "lockstep/data/generated_dataset.hpp"
#include "lockstep/data/idx_dataset.hpp"

namespace lockstep {

LOCKSTEP_INLINE ImageDataset fashion_mnist(const std::string& split, Normalization normalization) {
  if (const auto files = detail::find_idx_files(split))
    return read_idx_dataset(*files, {10, normalization});
  std::fprintf(stderr,
               "lockstep: no Fashion-MNIST in %s, so \"%s\" is generated data; install Debian's "
               "dataset-fashion-mnist or set LOCKSTEP_DATA\n",
               detail::idx_folder().c_str(), split.c_str());
  GeneratedOptions options;
  options.samples = split == "train" ? 60'000 : 10'000;
  options.normalization = normalization;
  return generated_dataset(split, options);
}

}  // namespace lockstep
