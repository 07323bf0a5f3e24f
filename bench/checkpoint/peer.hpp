// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file PyTorch and Python's safetensors as one process that saves and loads when it is told to.

#include <sys/types.h>

#include <cstddef>
#include <cstdio>
#include <optional>
#include <string>

namespace bench {

class PythonPeer {
 public:
  /// Starts peers.py with the PyTorch that LOCKSTEP_TORCH names. Where there is none, nothing is
  /// there to be asked.
  PythonPeer(std::size_t width, const std::string& device);
  PythonPeer(const PythonPeer&) = delete;
  PythonPeer& operator=(const PythonPeer&) = delete;
  ~PythonPeer();

  bool has_torch() const { return output_ != nullptr && !torch_.empty(); }
  bool has_safetensors() const { return has_torch() && !safetensors_.empty(); }
  /// Which versions, for the heading.
  std::string text() const;
  std::size_t parameters() const { return parameters_; }

  /// Seconds that a command took, by Python's own clock.
  double run(const std::string& command, const std::string& path);

 private:
  std::string answer();

  pid_t child_ = -1;
  std::FILE* output_ = nullptr;  // one socket, both ways
  std::FILE* input_ = nullptr;
  std::string torch_;
  std::string safetensors_;
  std::size_t parameters_ = 0;
};

}  // namespace bench
