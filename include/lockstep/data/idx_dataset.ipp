// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `idx_dataset.hpp`.

#include <unistd.h>

#include <cstdlib>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/data/idx.hpp"
#include "lockstep/data/idx_dataset.hpp"

namespace lockstep {

LOCKSTEP_INLINE ImageDataset read_idx_dataset(const detail::IdxFiles& files,
                                              const IdxOptions& options) {
  IdxArray images = read_idx(files.images, 3);
  IdxArray labels = read_idx(files.labels, 1);
  if (images.extents[0] != labels.extents[0]) {
    detail::fail("read_idx_dataset",
                 {files.images, " has ", images.extents[0], " images and ", files.labels, " ",
                  labels.extents[0], " labels"},
                 "give files of the same set");
  }
  return {std::move(images.bytes), std::move(labels.bytes), options.classes, options.normalization,
          files.labels};
}

namespace detail {

LOCKSTEP_INLINE std::string idx_folder() {
  const char* const folder = std::getenv("LOCKSTEP_DATA");
  return folder != nullptr ? folder : "/usr/share/datasets/fashion-mnist";
}

LOCKSTEP_INLINE std::optional<IdxFiles> find_idx_files(const std::string& split,
                                                       const std::string& folder) {
  if (split != "train" && split != "test") {
    detail::fail("idx_dataset", {"there is no split '", split, "'"}, "say \"train\" or \"test\"");
  }
  const auto find = [&](const char* name) -> std::string {
    for (const char* ending : {"", ".gz"}) {
      const char* const stem = split == "train" ? "/train" : "/t10k";
      std::string path = detail::text({folder, stem, name, ending});
      if (::access(path.c_str(), F_OK) == 0) return path;
    }
    return {};
  };
  IdxFiles files{find("-images-idx3-ubyte"), find("-labels-idx1-ubyte")};
  if (files.images.empty() || files.labels.empty()) return std::nullopt;
  return files;
}

}  // namespace detail

LOCKSTEP_INLINE ImageDataset idx_dataset(const std::string& split, const IdxOptions& options) {
  const std::string folder = options.folder.empty() ? detail::idx_folder() : options.folder;
  const std::optional<detail::IdxFiles> files = detail::find_idx_files(split, folder);
  if (files) return read_idx_dataset(*files, options);
  detail::fail(
      "idx_dataset",
      {"no ", split == "train" ? "train" : "t10k",
       "-images-idx3-ubyte and -labels-idx1-ubyte, plain or .gz, in ", folder},
      "install Debian's dataset-fashion-mnist, set LOCKSTEP_DATA or --data to their folder, or ask "
      "for --data generated");
}

}  // namespace lockstep
