// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Contestants that take turns, a whole save or load each, and the table of their ratios.

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "measure.hpp"

namespace bench {

inline double seconds_of(const auto& f) {
  const auto begin = Clock::now();
  f();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// `run` says how long its turn took; `before` is not timed.
struct Turn {
  std::string name;
  std::function<double()> run;
  std::function<void()> before{};
};

using Results = std::map<std::string, Times>;

/// Everyone's turn, so many times, with a quiet disk before each. The first round warms up.
inline Results take_turns(const std::vector<Turn>& turns, int rounds) {
  std::map<std::string, std::vector<double>> seconds;
  for (int round = 0; round <= rounds; ++round) {
    for (const Turn& turn : turns) {
      if (turn.before) turn.before();
      ::sync();
      const double taken = turn.run();
      if (round != 0) seconds[turn.name].push_back(1e3 * taken);
    }
  }
  Results results;
  for (const auto& [name, values] : seconds) results[name] = summary(values);
  return results;
}

class RatioTable {
 public:
  explicit RatioTable(double mebibytes) : mebibytes_(mebibytes) {
    std::printf(
        "| | lockstep median ms | min | GB/s | peer median | min | GB/s | ratio | target |\n"
        "|---|---|---|---|---|---|---|---|---|\n");
  }

  /// A ratio is the peer's time over lockstep's; where lower is better, lockstep's over the peer's.
  void row(const std::string& measure, Times own, Times peer, double target, bool lower = false) {
    nlohmann::json line{{"measure", measure}, {"lockstep", own.median}};
    line["peer"] = peer.known ? nlohmann::json(peer.median) : nlohmann::json(nullptr);
    line["target"] = target == 0 ? nlohmann::json(nullptr) : nlohmann::json(target);
    std::printf("| %s | %.1f | %.1f | %.2f |", measure.c_str(), own.median, own.minimum,
                rate(own.median));
    if (peer.known) {
      const auto ratio_of = [&](double mine, double other) {
        return lower ? mine / other : other / mine;
      };
      const double ratio = ratio_of(own.median, peer.median);
      const bool met = target == 0 || (lower ? ratio <= target : ratio >= target);
      char verdict[48] = "";
      if (target != 0)
        std::snprintf(verdict, sizeof verdict, "%s %g %s", lower ? "at most" : "at least", target,
                      met ? "met" : "MISSED");
      std::printf(" %.1f | %.1f | %.2f | %.3f (minima %.3f) | %s |\n", peer.median, peer.minimum,
                  rate(peer.median), ratio, ratio_of(own.minimum, peer.minimum), verdict);
      line["ratio"] = ratio;
      line["met"] = met;
    } else {
      std::printf(" - | - | - | - | |\n");
      line["ratio"] = line["met"] = nullptr;
    }
    std::fflush(stdout);
    rows_.push_back(line);
  }

  /// MiB at the height, over what is saved; a hundredth is the header's and the allocator's.
  void memory(const std::string& measure, double taken, double target) {
    const double copies = taken / mebibytes_;
    std::printf("%s: %.1f MiB, %.3f of what is saved%s\n", measure.c_str(), taken, copies,
                target == 0               ? ""
                : copies <= 1.01 * target ? " (met: at most one copy)"
                                          : " (MISSED: at most one copy)");
    rows_.push_back({{"measure", measure},
                     {"mebibytes", taken},
                     {"copies", copies},
                     {"met", target == 0 || copies <= 1.01 * target}});
  }

  void write(const std::string& name) const {
    std::ofstream(LOCKSTEP_SOURCE_DIR "/build/bench/" + name + ".json") << rows_.dump(2) << "\n";
  }

 private:
  double rate(double milliseconds) const { return mebibytes_ * 1.048576 / milliseconds; }

  double mebibytes_;
  nlohmann::json rows_ = nlohmann::json::array();
};

}  // namespace bench
