// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Pairs of IDX files, images and labels, as a data set.

#include <cstddef>
#include <optional>
#include <string>

#include "lockstep/core/macros.hpp"
#include "lockstep/data/image_dataset.hpp"

namespace lockstep {

/// How many classes an IDX data set has, and how its bytes become floats.
struct IdxOptions {
  std::size_t classes = 10;
  Normalization normalization{};
  std::string folder{};  ///< without one: $LOCKSTEP_DATA, else where Debian's package has it
};

namespace detail {

/// The paths of images and labels.
struct IdxFiles {
  std::string images;
  std::string labels;
};

}  // namespace detail

/// Reads the two files and checks that they belong together.
ImageDataset read_idx_dataset(const detail::IdxFiles& files, const IdxOptions& options = {});

namespace detail {

/// $LOCKSTEP_DATA, else where Debian's dataset-fashion-mnist is.
std::string idx_folder();

/// The files of a split, "train" or "test", under the names that MNIST gave them; nothing if one of
/// them is missing.
std::optional<IdxFiles> find_idx_files(const std::string& split, const std::string& folder);

}  // namespace detail

/// The split of MNIST, Fashion-MNIST or another set in their format.
ImageDataset idx_dataset(const std::string& split, const IdxOptions& options = {});

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/idx_dataset.ipp"
#endif
