// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A table of times against those of peers, on the screen and as a file of build/bench.

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "measure.hpp"

namespace bench {

class ComparisonTable {
 public:
  ComparisonTable() {
    std::printf(
        "| | lockstep median | min | peer median | min | ratio | target |\n"
        "|---|---|---|---|---|---|---|\n");
  }

  /// A ratio is the peer's time over lockstep's; where lower is better, lockstep's over the peer's.
  void row(const std::string& measure, Times own, Times peer, double target, bool lower = false) {
    nlohmann::json row{{"measure", measure}, {"lockstep", own.median}};
    row["peer"] = peer.known ? nlohmann::json(peer.median) : nlohmann::json(nullptr);
    row["target"] = target == 0 ? nlohmann::json(nullptr) : nlohmann::json(target);
    if (!peer.known) {
      std::printf("| %s | %.2f | %.2f | - | - | - | |\n", measure.c_str(), own.median, own.minimum);
      row["ratio"] = row["met"] = nullptr;
    } else {
      const double ratio = lower ? own.median / peer.median : peer.median / own.median;
      const double least = lower ? own.minimum / peer.minimum : peer.minimum / own.minimum;
      const bool met = target == 0 || (lower ? ratio <= target : ratio >= target);
      std::printf(
          "| %s | %.2f | %.2f | %.2f | %.2f | %.3f (minima %.3f) | %s |\n", measure.c_str(),
          own.median, own.minimum, peer.median, peer.minimum, ratio, least,
          target == 0 ? "" : (nlohmann::json(target).dump() + (met ? " met" : " MISSED")).c_str());
      row["ratio"] = ratio;
      row["met"] = met;
    }
    rows_.push_back(row);
  }
  /// A line of another kind, for the file alone.
  void add(const nlohmann::json& row) { rows_.push_back(row); }

  void write(const std::string& name) const {
    std::ofstream(LOCKSTEP_SOURCE_DIR "/build/bench/" + name + ".json") << rows_.dump(2) << "\n";
  }

 private:
  nlohmann::json rows_ = nlohmann::json::array();
};

}  // namespace bench
