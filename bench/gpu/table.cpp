// SPDX-License-Identifier: Apache-2.0
#include "table.hpp"

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace bench {
namespace {

nlohmann::json print_row(const Comparison& row) {
  nlohmann::json line{{"measure", row.measure}, {"lockstep", row.own.median}};
  line["target"] = row.target == 0 ? nlohmann::json(nullptr) : nlohmann::json(row.target);
  if (!row.peer.known || !row.own.known) {
    std::printf("| %s | %.2f | %.2f | - | - | - | |\n", row.measure.c_str(), row.own.median,
                row.own.minimum);
    line["peer"] = line["ratio"] = line["met"] = nullptr;
    return line;
  }
  const double ratio = row.peer.median / row.own.median;
  const bool met = ratio >= row.target;
  char target[32] = "";
  if (row.target != 0) {
    std::snprintf(target, sizeof target, "%g %s", row.target, met ? "met" : "MISSED");
  }
  std::printf("| %s | %.2f | %.2f | %.2f | %.2f | %.3f (minima %.3f) | %s |\n", row.measure.c_str(),
              row.own.median, row.own.minimum, row.peer.median, row.peer.minimum, ratio,
              row.peer.minimum / row.own.minimum, target);
  line["peer"] = row.peer.median;
  line["ratio"] = ratio;
  line["met"] = met;
  return line;
}

}  // namespace

void print_table(const std::vector<Comparison>& rows, const std::string& file) {
  static nlohmann::json all = nlohmann::json::array();
  std::printf(
      "\n| | lockstep median us | min | peer median | min | ratio | target |\n"
      "|---|---|---|---|---|---|---|\n");
  for (const Comparison& row : rows) all.push_back(print_row(row));
  std::fflush(stdout);
  std::ofstream(LOCKSTEP_SOURCE_DIR "/build/bench/" + file + ".json") << all.dump(2) << "\n";
}

}  // namespace bench
