// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Fashion-MNIST, or generated data of its shape where that is asked for.

#include <string>

#include "lockstep/core/macros.hpp"
#include "lockstep/data/image_dataset.hpp"

namespace lockstep {

/// The files in the folder `source`; without one, `idx_dataset(split)`. Files that are missing or
/// damaged are an error. Only where `source` is "generated" it is `generated_dataset(split)`, with
/// as many samples as Fashion-MNIST has. A trainer's `--data` is `job.data()`.
ImageDataset fashion_mnist(const std::string& split, const std::string& source = "",
                           Normalization normalization = {});

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/fashion_mnist.ipp"
#endif
