// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Samples a second, side by side, on the screen and as rows for build/bench.

#include <cstddef>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "measure.hpp"
#include "torch_loader.hpp"

namespace bench {

/// Samples a second, side by side.
class RateTable {
 public:
  explicit RateTable(std::size_t samples) : samples_(static_cast<double>(samples)) {
    std::printf(
        "| thousands of samples a second | lockstep | best | memcpy / lockstep | PyTorch | best | "
        "ratio | PyTorch without collation | ratio | target |\n|---|---|---|---|---|---|---|---|---"
        "|---|\n");
  }

  /// Seconds of epochs.
  void row(const Case& of, Times own, Times copied, Times torch, Times batched) {
    std::printf("| %s | %.0f | %.0f | %.2f |", of.text().c_str(), rate(own.median),
                rate(own.minimum), copied.median / own.median);
    if (torch.known) {
      std::printf(" %.1f | %.1f | %.1fx |", rate(torch.median), rate(torch.minimum),
                  torch.median / own.median);
    } else {
      std::printf(" - | - | - |");
    }
    if (batched.known) {
      std::printf(" %.1f | %.1fx |", rate(batched.median), batched.median / own.median);
    } else {
      std::printf(" | |");
    }
    const bool has_target = torch.known && of.batch == 64;
    const bool met = torch.median / own.median >= 10;
    std::printf(" %s |\n", !has_target ? "" : met ? "10 met" : "10 MISSED");
    std::fflush(stdout);
    add(of.text() + ", us a batch, against PyTorch", of, own, torch, has_target ? 10 : 0);
    if (batched.known) {
      add(of.text() + ", us a batch, against PyTorch without collation", of, own, batched, 0);
    }
    add(of.text() + ", us a batch, against memcpy", of, own, copied, 0);
  }
  const nlohmann::json& rows() const { return rows_; }

 private:
  double rate(double seconds) const { return samples_ / seconds / 1e3; }
  void add(const std::string& measure, const Case& of, Times own, Times peer, double target) {
    const double scale = 1e6 * static_cast<double>(of.batch) / samples_;
    nlohmann::json row{{"measure", measure}, {"lockstep", own.median * scale}};
    row["peer"] = peer.known ? nlohmann::json(peer.median * scale) : nlohmann::json(nullptr);
    row["ratio"] = peer.known ? nlohmann::json(peer.median / own.median) : nlohmann::json(nullptr);
    row["target"] = target == 0 ? nlohmann::json(nullptr) : nlohmann::json(target);
    row["met"] = !peer.known || target == 0 || peer.median / own.median >= target;
    rows_.push_back(row);
  }

  double samples_;
  nlohmann::json rows_ = nlohmann::json::array();
};

}  // namespace bench
