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

/// An optimizer's numbers, as a case of ddp.json has them.
void set_options(auto& options, const nlohmann::json& hyper) {
  options.lr = hyper["lr"];
  options.weight_decay = hyper.value("weight_decay", 0.0);
  if constexpr (requires { options.momentum; }) options.momentum = hyper["momentum"];
  if constexpr (requires { options.beta1; }) {
    options.beta1 = hyper["betas"][0];
    options.beta2 = hyper["betas"][1];
    options.eps = hyper["eps"];
  }
}
