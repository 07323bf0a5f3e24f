// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Fashion-MNIST, or something of its shape where it is not installed: examples always run.

#include <cstdio>
#include <string>

#include "lockstep/data/generated_dataset.hpp"
#include "lockstep/data/idx_dataset.hpp"
#include "lockstep/data/image_dataset.hpp"

namespace lockstep {

/// `idx_dataset(split)`, or a generated set and a sentence on stderr. A damaged file is an error.
inline ImageDataset fashion_mnist(const std::string& split, Normalization normalization = {}) {
  if (const auto files = find_idx_files(split))
    return read_idx_dataset(*files, {.classes = 10, .normalization = normalization});
  std::fprintf(stderr,
               "lockstep: no Fashion-MNIST in %s, so \"%s\" is generated data; install Debian's "
               "dataset-fashion-mnist or set LOCKSTEP_DATA\n",
               idx_folder().c_str(), split.c_str());
  GeneratedOptions options;
  options.samples = split == "train" ? 60'000 : 10'000;
  options.normalization = normalization;
  return generated_dataset(split, options);
}

}  // namespace lockstep
