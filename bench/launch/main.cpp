// SPDX-License-Identifier: Apache-2.0
// From the command line to the first collective: this program launching itself, against torchrun
// and PyTorch with Gloo. Both say when the first all-reduce of 1,000 floats is over, on the clock
// that all processes of a host share.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.hpp"
#include "lockstep/launch/launch.hpp"

using namespace lockstep;

namespace {

constexpr char mark[] = "first collective at ";

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Being a rank.
int run_rank(int argc, char** argv) {
  return launch(argc, argv, [](Session& session) {
    auto comm = make_shm_communicator(session.membership(), session.store());
    std::vector<float> x(1000, 1.f);
    comm.all_reduce(x);
    if (comm.rank() == Rank{0}) std::printf("%s%.9f\n", mark, now());
  });
}

/// Seconds from starting the command to its mark; nothing if it has none.
std::optional<double> time_to_mark(const std::string& command) {
  const double begin = now();
  FILE* const output = popen((command + " 2>/dev/null").c_str(), "r");
  if (output == nullptr) return std::nullopt;
  std::optional<double> first;
  for (char line[512]; std::fgets(line, sizeof line, output) != nullptr;) {
    const std::string text(line);
    const std::size_t at = text.find(mark);
    if (at != std::string::npos) first = std::atof(text.c_str() + at + sizeof(mark) - 1) - begin;
  }
  const int status = pclose(output);
  return status == 0 ? first : std::nullopt;
}

struct Times {
  double median = 0;
  double minimum = 0;
};

std::optional<Times> summarize(std::vector<double> seconds) {
  if (seconds.empty()) return std::nullopt;
  std::sort(seconds.begin(), seconds.end());
  return Times{seconds[seconds.size() / 2], seconds.front()};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) return run_rank(argc, argv);  // ranks keep the last argument
  const char* const torch = std::getenv("LOCKSTEP_TORCH");
  std::printf("Launch to first collective, 2 ranks as processes on one host\n\n");
  std::vector<double> own;
  std::vector<double> peer;
  for (int i = 0; i < 5; ++i) {  // by turns, so that noise hits both
    for (int k = 0; k < 4; ++k) {
      if (const auto t = time_to_mark(std::string(argv[0]) + " --ranks 2 be-a-rank"))
        own.push_back(*t);
    }
    if (torch == nullptr) continue;
    const auto t = time_to_mark("timeout 60 " + std::string(torch) +
                                "/torchrun --standalone --nproc-per-node 2 " LOCKSTEP_SOURCE_DIR
                                "/bench/launch/first_collective.py");
    if (t) peer.push_back(*t);
  }
  const auto ours = summarize(own);
  const auto theirs = summarize(peer);
  if (!ours) {
    std::fprintf(stderr, "this program could not launch itself\n");
    return 1;
  }
  const double ratio = theirs ? theirs->median / ours->median : 0;
  std::printf("| | median | minimum |\n|---|---|---|\n");
  std::printf("| lockstep --ranks 2, Shm | %.1f ms | %.1f ms |\n", 1e3 * ours->median,
              1e3 * ours->minimum);
  if (theirs) {
    std::printf("| torchrun, PyTorch, Gloo | %.0f ms | %.0f ms |\n", 1e3 * theirs->median,
                1e3 * theirs->minimum);
    std::printf("| ratio | %.0fx | %.0fx |\n", ratio, theirs->minimum / ours->minimum);
  } else {
    std::printf("| torchrun, PyTorch, Gloo | - (not installed) | - |\n");
  }
  nlohmann::json row{{"measure", "launch to first collective, W=2, seconds"},
                     {"lockstep", ours->median}};
  row["peer"] = theirs ? nlohmann::json(theirs->median) : nlohmann::json(nullptr);
  row["ratio"] = theirs ? nlohmann::json(ratio) : nlohmann::json(nullptr);
  row["target"] = 50;
  row["met"] = ratio >= 50;
  std::ofstream(LOCKSTEP_SOURCE_DIR "/build/bench/launch.json")
      << nlohmann::json::array({row}).dump(2) << "\n";
  return 0;
}
