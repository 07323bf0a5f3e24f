// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A folder for checkpoints, and what is in them.

#include <stdlib.h>

#include <cstddef>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/checkpoint/reader.hpp"
#include "lockstep/checkpoint/safetensors.hpp"
#include "lockstep/core/element.hpp"

namespace checkpoints {

using namespace lockstep;

/// A folder that is there as long as this object is.
struct Folder {
  Folder() {
    char name[] = "/tmp/lockstep-checkpoint-XXXXXX";
    if (::mkdtemp(name) == nullptr) throw std::runtime_error("no folder");
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string operator/(const std::string& name) const { return path + "/" + name; }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path))
      names.push_back(entry.path().filename().string());
    return names;
  }

  std::string path;
};

/// All tensors of a checkpoint, as bytes by name.
inline std::map<std::string, std::string> tensors_of(const std::string& path) {
  const detail::CheckpointReader reader(path);
  reader.verify();
  std::map<std::string, std::string> all;
  for (const auto& tensor : reader.tensors()) {
    std::string bytes(tensor.count * detail::element_size(tensor.kind()), '\0');
    reader.read(tensor, 0, tensor.count, reinterpret_cast<std::byte*>(bytes.data()));
    all[tensor.name] = detail::shape_text(tensor.shape) + bytes;
  }
  return all;
}

}  // namespace checkpoints
