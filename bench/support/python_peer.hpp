// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A script as a process that does what it is told, a line each, so that a peer in Python can
/// take turns with others.

#include <sys/types.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace bench {

class PythonPeer {
 public:
  /// Starts a script of bench/ with the PyTorch that LOCKSTEP_TORCH names. The first line that it
  /// says is `hello`. Where there is no PyTorch, nothing is there to be asked.
  PythonPeer(const std::string& script, const std::vector<std::string>& arguments);
  PythonPeer(const PythonPeer&) = delete;
  PythonPeer& operator=(const PythonPeer&) = delete;
  ~PythonPeer();

  bool is_there() const { return hello_.is_object(); }
  const nlohmann::json& hello() const { return hello_; }

  /// The script's answer, an object, to a line.
  nlohmann::json ask(const std::string& line);

 private:
  nlohmann::json answer();

  pid_t child_ = -1;
  std::FILE* output_ = nullptr;  // one socket, both ways
  std::FILE* input_ = nullptr;
  nlohmann::json hello_;
};

}  // namespace bench
