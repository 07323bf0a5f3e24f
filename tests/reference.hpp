// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file PyTorch's figures for parity tests: the folder LOCKSTEP_REFERENCE, else tests/reference.

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

inline nlohmann::json reference(const std::string& file) {
  const char* const folder = std::getenv("LOCKSTEP_REFERENCE");
  const std::string path =
      (folder != nullptr ? folder : LOCKSTEP_SOURCE_DIR "/tests/reference") + ("/" + file);
  std::ifstream in(path);
  if (!in) throw std::runtime_error("no reference figures at " + path);
  return nlohmann::json::parse(in);
}
