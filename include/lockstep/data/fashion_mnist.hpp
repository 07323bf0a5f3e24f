// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Fashion-MNIST, or generated data of its shape where it is not installed.

#include <string>

#include "lockstep/core/macros.hpp"
#include "lockstep/data/image_dataset.hpp"

namespace lockstep {

/// `idx_dataset(split)`, or a generated data set with a note on stderr. A damaged file is an error.
ImageDataset fashion_mnist(const std::string& split, Normalization normalization = {});

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/fashion_mnist.ipp"
#endif
