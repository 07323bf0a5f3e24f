// SPDX-License-Identifier: Apache-2.0
// Forward and backward of the examples' MLP, 784-256-256-10, on one core, nothing else: lockstep's
// bare step with Eigen's products against eager PyTorch on one thread. Both take turns; the fastest
// step counts, because others may use the machine.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "mlp.hpp"

namespace {

constexpr std::size_t batch_sizes[] = {32, 64, 128};
constexpr double seconds_a_turn = 1;
constexpr int turns = 5;
constexpr double target = 1.5;  // of the whole DDP step, which is hardly more than this

using Model = Mlp<float, 784, 256, 10>;

struct Samples {
  std::vector<float> inputs;
  std::vector<std::int32_t> labels;
  std::size_t size() const { return labels.size(); }
};

struct Times {
  double minimum = 1e9;
  double median = 1e9;  // of the quietest turn
  void add(double other_minimum, double other_median) {
    minimum = std::min(minimum, other_minimum);
    median = std::min(median, other_median);
  }
};

void run_own(std::map<std::size_t, Times>& times) {
  constexpr std::size_t bytes = detail::Layout<Model>::plan().bytes;
  const HostArena parameters(bytes);
  const HostArena gradients(bytes);
  Model model;
  detail::BareStep<Model> step(model, {parameters.data(), gradients.data()});
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  auto* const p = reinterpret_cast<float*>(parameters.data());
  for (std::size_t i = 0; i < bytes / sizeof(float); ++i) p[i] = 0.05f * normal(random);
  for (const std::size_t rows : batch_sizes) {
    Samples batch{std::vector<float>(rows * 784), std::vector<std::int32_t>(rows)};
    for (float& x : batch.inputs) x = normal(random);
    for (auto& label : batch.labels) label = static_cast<std::int32_t>(random() % 10);
    using Clock = std::chrono::steady_clock;
    std::vector<double> seconds;
    for (const auto begin = Clock::now();;) {
      const auto start = Clock::now();
      if (std::chrono::duration<double>(start - begin).count() > seconds_a_turn) break;
      model.forward(step, batch);
      model.backward(step, batch);
      seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    }
    std::sort(seconds.begin(), seconds.end());
    times[rows].add(seconds.front(), seconds[seconds.size() / 2]);
  }
}

void run_torch(std::map<std::size_t, Times>& times) {
  const char* const torch = std::getenv("LOCKSTEP_TORCH");
  if (torch == nullptr) return;
  std::string command = std::string(torch) +
                        "/python3 " LOCKSTEP_SOURCE_DIR "/bench/matmul/eager.py " +
                        std::to_string(seconds_a_turn);
  for (const std::size_t rows : batch_sizes) command.append(" ").append(std::to_string(rows));
  FILE* const output = popen(command.c_str(), "r");
  if (output == nullptr) return;
  std::size_t rows = 0;
  Times turn;
  while (std::fscanf(output, "%zu %lf %lf", &rows, &turn.minimum, &turn.median) == 3) {
    times[rows].add(turn.minimum, turn.median);
  }
  pclose(output);
}

}  // namespace

int main() {
  std::map<std::size_t, Times> own;
  std::map<std::size_t, Times> peer;
  for (int i = 0; i < turns; ++i) {
    run_own(own);
    run_torch(peer);
  }
  std::printf("Forward and backward of an MLP 784-256-256-10, one core, float; times in us\n\n");
  std::printf(
      "| batch | lockstep min | median | Gflop/s | PyTorch min | median | ratio of minima |\n");
  std::printf("|---|---|---|---|---|---|---|\n");
  nlohmann::json rows = nlohmann::json::array();
  for (const auto& [batch, ours] : own) {
    // forward and weight gradients of all layers, input gradients of all but the first
    const double flops =
        2.0 * static_cast<double>(batch) * (2 * 784 * 256 + 3 * (256 * 256 + 2560));
    std::printf("| %zu | %.0f | %.0f | %.1f |", batch, 1e6 * ours.minimum, 1e6 * ours.median,
                flops / ours.minimum * 1e-9);
    const std::string measure = "MLP forward + backward, us, batch ";
    nlohmann::json row{{"measure", measure + std::to_string(batch)},
                       {"lockstep", 1e6 * ours.minimum},
                       {"peer", nullptr},
                       {"ratio", nullptr},
                       {"target", nullptr},
                       {"met", true}};
    if (batch == 32) row["target"] = target;
    if (const auto found = peer.find(batch); found != peer.end()) {
      const Times& theirs = found->second;
      const double ratio = theirs.minimum / ours.minimum;
      std::printf(" %.0f | %.0f | %.2f |\n", 1e6 * theirs.minimum, 1e6 * theirs.median, ratio);
      row["peer"] = 1e6 * theirs.minimum;
      row["ratio"] = ratio;
      if (batch == 32) row["met"] = ratio >= target;
    } else {
      std::printf(" - | - | - |\n");
      if (batch == 32) row["met"] = false;
    }
    rows.push_back(row);
  }
  std::ofstream(LOCKSTEP_SOURCE_DIR "/build/bench/matmul.json") << rows.dump(2) << "\n";
  return 0;
}
