// SPDX-License-Identifier: Apache-2.0
// The indices of one rank for one epoch: DistributedSampler here against PyTorch's, as a list and
// until the first index is known. Both must draw the same.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/data/sampler.hpp"

using namespace lockstep;

namespace {

constexpr std::size_t world = 8;
constexpr std::size_t sizes[] = {60'000, 1'000'000, 100'000'000};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Times {
  double median = 0;
  double minimum = 0;
};

Times summarize(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds.front()};
}

template <class Order>
DistributedSampler<Padding, Order> make_sampler(std::size_t samples) {
  return {samples, WorldSize{world}, Rank{1}, {true, Seed{1}}};
}

/// An epoch's indices as a vector, and the checksum that torch_sampler.py computes.
template <class Order>
std::pair<double, std::uint32_t> list_indices(std::size_t samples) {
  const double begin = now();
  const auto sampler = make_sampler<Order>(samples);
  std::vector<std::size_t> indices(sampler.size());
  for (std::size_t k = 0; k != indices.size(); ++k) indices[k] = sampler[k];
  const double seconds = now() - begin;
  std::uint32_t checksum = 0;
  for (std::size_t k = 0; k < indices.size(); k += 1 + indices.size() / 1000)
    checksum = checksum * 31 + static_cast<std::uint32_t>(indices[k]);
  return {seconds, checksum};
}

/// Seconds until the first index is known, over many samplers with keys of their own: a single one
/// is faster than the clock.
template <class Order>
double first_index(std::size_t samples, std::size_t repeats) {
  std::size_t sum = 0;
  const double begin = now();
  for (std::size_t i = 0; i != repeats; ++i) {
    auto sampler = make_sampler<Order>(samples);
    sampler.set_epoch(Epoch{i});
    sum += sampler[0];
  }
  const double seconds = now() - begin;
  if (sum == 1) std::printf(" ");  // so that the compiler must compute it
  return seconds / static_cast<double>(repeats);
}

/// What PyTorch says; null where it is not installed.
nlohmann::json run_torch(std::size_t samples) {
  const char* const torch = std::getenv("LOCKSTEP_TORCH");
  if (torch == nullptr) return nullptr;
  std::string command(torch);
  command += "/python3 " LOCKSTEP_SOURCE_DIR "/bench/sampler/torch_sampler.py ";
  command += std::to_string(world) + ' ' + std::to_string(samples) + " 2>/dev/null";
  FILE* const output = popen(command.c_str(), "r");
  if (output == nullptr) return nullptr;
  std::string text;
  for (char line[4096]; std::fgets(line, sizeof line, output) != nullptr;) text += line;
  pclose(output);
  const nlohmann::json answer = nlohmann::json::parse(text, nullptr, false);
  return answer.is_object() ? answer : nlohmann::json(nullptr);
}

nlohmann::json row(const std::string& measure, Times ours, const Times* theirs, double target) {
  const double ratio = theirs != nullptr ? theirs->median / ours.median : 0;
  if (theirs != nullptr) {
    std::printf("| %s | %.4g ms | %.4g ms | %.4g ms | %.4g ms | %.3gx | %.gx | %s |\n",
                measure.c_str(), 1e3 * ours.median, 1e3 * ours.minimum, 1e3 * theirs->median,
                1e3 * theirs->minimum, ratio, target, ratio >= target ? "yes" : "no");
  } else {
    std::printf("| %s | %.4g ms | %.4g ms | - | - | - | %.gx | - |\n", measure.c_str(),
                1e3 * ours.median, 1e3 * ours.minimum, target);
  }
  nlohmann::json json{{"measure", measure + ", seconds"}, {"lockstep", ours.median}};
  json["peer"] = theirs != nullptr ? nlohmann::json(theirs->median) : nlohmann::json(nullptr);
  json["ratio"] = theirs != nullptr ? nlohmann::json(ratio) : nlohmann::json(nullptr);
  json["target"] = target;
  json["met"] = ratio >= target;
  return json;
}

std::string text_of(std::size_t samples) {
  const bool millions = samples >= 1'000'000;
  std::string text = std::to_string(samples / (millions ? 1'000'000 : 1000));
  text += millions ? " M" : " k";
  return text;
}

}  // namespace

int main() {
  std::printf("The indices of rank 1 of %zu for one epoch\n\n", world);
  std::printf(
      "| | lockstep median | minimum | PyTorch median | minimum | ratio | target | met |\n"
      "|---|---|---|---|---|---|---|---|\n");
  nlohmann::json rows = nlohmann::json::array();
  nlohmann::json torch;
  bool same = true;
  for (std::size_t samples : sizes) {
    torch = run_torch(samples);  // alone: at 100 M it needs 6 GB
    std::vector<double> seconds;
    std::uint32_t checksum = 0;
    for (int i = 0; i != (samples > 10'000'000 ? 5 : 41); ++i) {
      const auto [time, sum] = list_indices<TorchShuffle>(samples);
      seconds.push_back(time);
      checksum = sum;
    }
    Times theirs;
    if (!torch.is_null()) {
      theirs = summarize(torch["list"]);
      same = same && checksum == torch["checksum"].get<std::uint32_t>();
    }
    rows.push_back(row("#12: torch-exact list of " + text_of(samples), summarize(seconds),
                       torch.is_null() ? nullptr : &theirs, 5));
  }
  const std::size_t largest = sizes[2];
  std::vector<double> keyed;
  for (int i = 0; i != 9; ++i) keyed.push_back(first_index<KeyedShuffle>(largest, 10'000));
  Times theirs;
  if (!torch.is_null()) theirs = summarize(torch["first"]);
  rows.push_back(row("#13: first index of " + text_of(largest) + ", KeyedShuffle", summarize(keyed),
                     torch.is_null() ? nullptr : &theirs, 1e4));
  std::vector<double> listed;
  for (int i = 0; i != 3; ++i) listed.push_back(list_indices<KeyedShuffle>(largest).first);
  std::printf("\nKeyedShuffle lists the same share of %s in %.4g ms, %.3g ns an index\n",
              text_of(largest).c_str(), 1e3 * summarize(listed).median,
              1e9 * summarize(listed).median * world / static_cast<double>(largest));
  std::ofstream(LOCKSTEP_SOURCE_DIR "/build/bench/sampler.json") << rows.dump(2) << "\n";
  if (!same) std::fprintf(stderr, "lockstep and PyTorch draw different samples\n");
  return same ? 0 : 1;
}
