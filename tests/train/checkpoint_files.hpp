// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A folder for checkpoints, and what is in them.

#include <cstddef>
#include <map>
#include <string>

#include "lockstep/detail/checkpoint/reader.hpp"
#include "lockstep/detail/checkpoint/safetensors.hpp"
#include "lockstep/detail/core/element.hpp"
#include "temporary_folder.hpp"

namespace checkpoints {

using namespace lockstep;

using Folder = TemporaryFolder;

/// All tensors of a checkpoint, as bytes by name.
inline std::map<std::string, std::string> tensors_of(const std::string& path) {
  const lockstep::detail::CheckpointReader reader(path);
  reader.verify();
  std::map<std::string, std::string> all;
  for (const auto& tensor : reader.tensors()) {
    std::string bytes(tensor.count * lockstep::detail::element_size(tensor.kind()), '\0');
    reader.read(tensor, 0, tensor.count, reinterpret_cast<std::byte*>(bytes.data()));
    all[tensor.name] = lockstep::detail::shape_text(tensor.shape) + bytes;
  }
  return all;
}

}  // namespace checkpoints
