// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Shapes of activations, and what PyTorch takes for them.

#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "measure.hpp"
#include "torch_lines.hpp"

namespace bench {

/// The activations of one norm: `batch:32x64x28x28:float32`, as bench/norm/norm.py takes it.
struct NormCase {
  std::string text;

  const std::string kind() const { return text.substr(0, text.find(':')); }
  std::vector<std::size_t> extents() const {
    std::vector<std::size_t> all;
    std::istringstream shape(text.substr(text.find(':') + 1));
    for (std::size_t extent; shape >> extent; shape.get()) all.push_back(extent);
    return all;
  }
  std::size_t size() const {
    std::size_t product = 1;
    for (const std::size_t extent : extents()) product *= extent;
    return product;
  }
  /// The shape and the element type, for tables.
  std::string words() const {
    std::string words = text.substr(text.find(':') + 1);
    words[words.find(':')] = ' ';
    return words;
  }
};

/// PyTorch's times by case, way, pass and clock: `batch:32x64x28x28:float32 relu both eager`.
class TorchNorms {
 public:
  /// Asks norm.py; nothing is known where PyTorch is not installed.
  void ask(const std::string& device, const std::vector<NormCase>& cases) {
    std::string program = "python3 " LOCKSTEP_SOURCE_DIR "/bench/norm/norm.py " + device;
    for (const NormCase& c : cases) program += " " + c.text;
    each_torch_line(program, 600, "norm", [&](const nlohmann::json& read) {
      add(read["case"].get<std::string>() + " " + read["way"].get<std::string>() + " " +
              read["pass"].get<std::string>() + " " + read["clock"].get<std::string>(),
          read);
    });
  }
  /// Asks sync_norm.py: `cpu 32x64x14x14 synced`; of one rank: `nccl 1 32x64x14x14 synced`.
  void ask_ranks(const std::string& how, const std::vector<std::string>& shapes, int ranks = 2) {
    std::string program = "torchrun --standalone --nproc-per-node " + std::to_string(ranks) +
                          " " LOCKSTEP_SOURCE_DIR "/bench/norm/sync_norm.py " + how;
    for (const std::string& shape : shapes) program += " " + shape;
    each_torch_line(program + " 2>/dev/null", 300, "sync", [&](const nlohmann::json& read) {
      add(how + (ranks == 1 ? " 1 " : " ") + read["case"].get<std::string>() + " " +
              read["way"].get<std::string>(),
          read);
    });
  }

  /// Of all rounds: the median of medians and the least minimum.
  Times operator()(const std::string& key) const {
    const auto found = times_.find(key);
    return found == times_.end() ? Times{} : found->second.all();
  }

 private:
  struct Rounds {
    std::vector<double> medians, minima;
    Times all() const { return {true, median(medians), summary(minima).minimum}; }
  };

  void add(const std::string& key, const nlohmann::json& read) {
    times_[key].medians.push_back(read["median"]);
    times_[key].minima.push_back(read["minimum"]);
  }

  std::map<std::string, Rounds> times_;
};

/// The time of a copy that moves other bytes than the one that was measured: a copy reads and
/// writes each byte, and this work so many times as much.
inline Times of_copy(Times copy, double share) {
  return {copy.known, copy.median * share, copy.minimum * share};
}

}  // namespace bench
