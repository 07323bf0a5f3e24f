// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What PyTorch, a peer to measure against, says of itself.

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

namespace bench {

/// Runs a program (`python3 bench/step/ddp.py ...`) of the PyTorch that LOCKSTEP_TORCH names, for
/// `seconds` at most, and calls `f(json)` for every line that is `word` and a JSON object. Other
/// lines are Gloo's. Nothing happens where PyTorch is not installed.
template <class F>
void each_torch_line(const std::string& program, int seconds, const std::string& word, const F& f) {
  const char* const torch = std::getenv("LOCKSTEP_TORCH");
  if (torch == nullptr) return;
  const std::string command =
      "timeout " + std::to_string(seconds) + " " + std::string(torch) + "/" + program;
  FILE* const output = popen(command.c_str(), "r");
  if (output == nullptr) return;
  for (char line[512]; std::fgets(line, sizeof line, output) != nullptr;) {
    const std::string text(line);
    if (text.starts_with(word + " ")) f(nlohmann::json::parse(text.substr(word.size() + 1)));
  }
  pclose(output);
}

}  // namespace bench
