// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file PyTorch and Python's safetensors as one process that saves and loads when it is told to.

#include <cstddef>
#include <string>

#include "python_peer.hpp"

namespace bench {

/// peers.py, which has the same tensors.
class SavingPeer {
 public:
  SavingPeer(std::size_t width, const std::string& device)
      : peer_(LOCKSTEP_SOURCE_DIR "/bench/checkpoint/peers.py", {std::to_string(width), device}) {}

  bool has_torch() const { return peer_.is_there(); }
  bool has_safetensors() const { return has_torch() && peer_.hello()["safetensors"].is_string(); }
  /// Which versions, for the heading.
  std::string text() const {
    if (!has_torch()) return "no PyTorch here: its columns stay empty";
    const auto version = [this](const char* of) { return peer_.hello()[of].get<std::string>(); };
    return "PyTorch " + version("torch") +
           (has_safetensors() ? ", safetensors " + version("safetensors") : ", no safetensors");
  }
  std::size_t parameters() const { return peer_.hello()["parameters"]; }

  /// Seconds that a command took, by Python's own clock.
  double run(const std::string& command, const std::string& path) {
    return peer_.ask(command + " " + path)["seconds"];
  }

 private:
  PythonPeer peer_;
};

}  // namespace bench
