// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Pairs of IDX files, images and labels, as a data set.

#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/data/idx.hpp"
#include "lockstep/data/image_dataset.hpp"

namespace lockstep {

struct IdxOptions {
  std::size_t classes = 10;
  Normalization normalization{};
};

/// Where images and their labels lie.
struct IdxFiles {
  std::string images;
  std::string labels;
};

/// Reads the two files and checks that they belong together.
inline ImageDataset read_idx_dataset(const IdxFiles& files, const IdxOptions& options = {}) {
  IdxArray images = read_idx(files.images, 3);
  IdxArray labels = read_idx(files.labels, 1);
  if (images.extents[0] != labels.extents[0])
    throw Error("read_idx_dataset",
                files.images + " has " + std::to_string(images.extents[0]) + " images and " +
                    files.labels + " " + std::to_string(labels.extents[0]) + " labels",
                "give files of the same set");
  return {std::move(images.bytes), std::move(labels.bytes), options.classes, options.normalization,
          files.labels};
}

/// The folder of `idx_dataset`: $LOCKSTEP_DATA, else where Debian's dataset-fashion-mnist is.
inline std::string idx_folder() {
  const char* const folder = std::getenv("LOCKSTEP_DATA");
  return folder != nullptr ? folder : "/usr/share/datasets/fashion-mnist";
}

/// The files of a split, "train" or "test", under the names that MNIST gave them; nothing if one of
/// them is missing.
inline std::optional<IdxFiles> find_idx_files(const std::string& split) {
  if (split != "train" && split != "test")
    throw Error("idx_dataset", "there is no split '" + split + "'", "say \"train\" or \"test\"");
  const std::string stem = idx_folder() + (split == "train" ? "/train" : "/t10k");
  const auto find = [&](const char* name) -> std::string {
    for (const char* ending : {"", ".gz"})
      if (std::string path = stem + name + ending; ::access(path.c_str(), F_OK) == 0) return path;
    return {};
  };
  IdxFiles files{find("-images-idx3-ubyte"), find("-labels-idx1-ubyte")};
  if (files.images.empty() || files.labels.empty()) return std::nullopt;
  return files;
}

/// The split of MNIST, Fashion-MNIST or another set in their format that `idx_folder` holds.
inline ImageDataset idx_dataset(const std::string& split, const IdxOptions& options = {}) {
  const std::optional<IdxFiles> files = find_idx_files(split);
  if (!files)
    throw Error("idx_dataset",
                "no " + std::string(split == "train" ? "train" : "t10k") +
                    "-images-idx3-ubyte and -labels-idx1-ubyte, plain or .gz, in " + idx_folder(),
                "install Debian's dataset-fashion-mnist, or set LOCKSTEP_DATA to their folder");
  return read_idx_dataset(*files, options);
}

}  // namespace lockstep
