// SPDX-License-Identifier: Apache-2.0
// From the command line to the first collective and to the end of the first training step: this
// program launching itself, against torchrun and PyTorch with Gloo. Both say when an all-reduce of
// 1,000 floats is over, and then a step of Linear(10, 1) under DDP, on the clock that all processes
// of a host share. Then how long the ranks of a large job take to meet: their clients of the store
// are played in one process.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/lockstep.hpp"
#include "models.hpp"
#include "store/many_clients.hpp"

using namespace lockstep;

namespace {

constexpr std::array<std::string_view, 2> marks = {"first collective at ", "first step at "};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Being a rank.
int run_rank(int argc, char** argv) {
  return launch(argc, argv, [](Session& session) {
    auto comm = make_shm_communicator(session.membership(), session.store());
    std::vector<float> x(1000, 1.f);
    comm.all_reduce(x);
    const double collective = now();
    DistributedDataParallel<bench::Linear> ddp(comm);
    LabelledBatch<float, float> batch;
    batch.resize(4, 10);
    ddp.step(batch);
    if (comm.rank() != Rank{0}) return;
    std::printf("%s%.9f\n%s%.9f\n", marks[0].data(), collective, marks[1].data(), now());
  });
}

/// Seconds from starting the command to each of its marks, added to `times`; nothing if it fails.
using Seconds = std::array<std::vector<double>, marks.size()>;
void time_to_marks(const std::string& command, Seconds& times) {
  const double begin = now();
  FILE* const output = popen((command + " 2>/dev/null").c_str(), "r");
  if (output == nullptr) return;
  std::array<double, marks.size()> found{};
  for (char line[512]; std::fgets(line, sizeof line, output) != nullptr;) {
    const std::string text(line);
    for (std::size_t m = 0; m < marks.size(); ++m) {
      const std::size_t at = text.find(marks[m]);
      if (at != std::string::npos)
        found[m] = std::atof(text.c_str() + at + marks[m].size()) - begin;
    }
  }
  if (pclose(output) != 0) return;
  for (std::size_t m = 0; m < marks.size(); ++m) times[m].push_back(found[m]);
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

/// Prints one mark's rows.
nlohmann::json report(const char* what, const Times& ours, const std::optional<Times>& theirs) {
  nlohmann::json row{{"measure", std::string("launch to ") + what + ", W=2, seconds"},
                     {"lockstep", ours.median},
                     {"peer", nullptr},
                     {"ratio", nullptr},
                     {"target", 50},
                     {"met", nullptr}};
  std::printf("| %s | %.1f ms | %.1f ms |", what, 1e3 * ours.median, 1e3 * ours.minimum);
  if (!theirs) {
    std::printf(" - (not installed) | - | - |\n");
    return row;
  }
  const double ratio = theirs->median / ours.median;
  std::printf(" %.0f ms | %.0f ms | %.0fx |\n", 1e3 * theirs->median, 1e3 * theirs->minimum, ratio);
  row["peer"] = theirs->median;
  row["ratio"] = ratio;
  row["met"] = ratio >= 50;
  return row;
}

/// Prints the table of large jobs. PyTorch's TCPStore has no row: driven like this, one client
/// after the other, each of its requests takes 40 ms (small writes that wait for an
/// acknowledgement), which real ranks would spend at the same time.
void report_crowds(nlohmann::json& rows) {
  std::printf(
      "\nRanks that meet, as clients of a store in one process: connect, join, compare GPUs\n\n"
      "| ranks | connect | join | GPUs | meet | one notice to all | requests |\n"
      "|---|---|---|---|---|---|---|\n");
  for (const std::size_t ranks : {64u, 256u, 1000u, 4096u}) {
    const many_clients::Times own = many_clients::play(ranks);
    std::printf("| %zu | %.3f s | %.3f s | %.3f s | %.3f s | %.3f s | %llu |\n", ranks, own.connect,
                own.join, own.gather, own.meet(), own.notice,
                static_cast<unsigned long long>(own.requests));
    rows.push_back({{"measure", std::to_string(ranks) + " ranks meet, seconds"},
                    {"lockstep", own.meet()},
                    {"peer", nullptr},
                    {"ratio", nullptr},
                    {"target", nullptr},
                    {"met", ranks == 1000 ? nlohmann::json(own.meet() < 5) : nlohmann::json()}});
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) return run_rank(argc, argv);  // ranks keep the last argument
  const char* const torch = std::getenv("LOCKSTEP_TORCH");
  std::printf("From the command line, 2 ranks as processes on one host\n\n");
  Seconds own;
  Seconds peer;
  for (int i = 0; i < 5; ++i) {  // by turns, so that noise hits both
    for (int k = 0; k < 4; ++k) time_to_marks(std::string(argv[0]) + " --ranks 2 be-a-rank", own);
    if (torch == nullptr) continue;
    time_to_marks("timeout 60 " + std::string(torch) +
                      "/torchrun --standalone --nproc-per-node 2 " LOCKSTEP_SOURCE_DIR
                      "/bench/launch/first_step.py",
                  peer);
  }
  if (own[0].empty()) {
    std::fprintf(stderr, "this program could not launch itself\n");
    return 1;
  }
  std::printf(
      "| to the | lockstep --ranks 2, Shm | minimum | torchrun, PyTorch, Gloo | minimum | ratio |\n"
      "|---|---|---|---|---|---|\n");
  nlohmann::json rows = nlohmann::json::array();
  rows.push_back(report("first collective", *summarize(own[0]), summarize(peer[0])));
  rows.push_back(report("first step", *summarize(own[1]), summarize(peer[1])));
  report_crowds(rows);
  std::ofstream(LOCKSTEP_SOURCE_DIR "/build/bench/launch.json") << rows.dump(2) << "\n";
  return 0;
}
