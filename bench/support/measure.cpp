// SPDX-License-Identifier: Apache-2.0
#include "measure.hpp"

#include <algorithm>
#include <stdexcept>

namespace bench {
namespace {

constexpr double batch_us = 500;       // fast work is repeated until a batch takes this long
constexpr double turn_us = 5'000;      // batches in a turn, at least one
constexpr double race_us = 2'500'000;  // all turns of all contestants
constexpr int most_turns = 40;         // 0.2 s for each
constexpr int least_turns = 5;

struct Plan {
  std::size_t iterations = 1;
  std::size_t batches = 1;
};

}  // namespace

double Stand::batch(const Contestant& contestant, std::size_t count, std::size_t iterations) {
  barrier();
  if (!contestant.has_threads) {  // all are awake now and start together
    track_.barrier.wait(static_cast<std::uint32_t>(ranks_));
  }
  auto& mine = track_.marks[rank_];
  mine.begin = Clock::now();
  contestant.run(count, iterations);
  mine.end = Clock::now();
  barrier();
  Clock::time_point first = mine.begin;
  Clock::time_point last = mine.end;
  for (std::size_t w = 0; w < ranks_; ++w) {
    first = std::min(first, track_.marks[w].begin);
    last = std::max(last, track_.marks[w].end);
  }
  return std::chrono::duration<double, std::micro>(last - first).count() /
         static_cast<double>(iterations);
}

/// Sums once and compares. Leaves zeroes, which stay what they are however often they are summed.
void Stand::verify(const Contestant& contestant, std::size_t count) {
  const auto data = contestant.data.first(std::min(count, contestant.data.size()));
  const auto value = [](std::size_t i, std::size_t factor) {
    return static_cast<float>((i % 1021 + 1) * factor);
  };
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = value(i, rank_ + 1);
  barrier();
  contestant.run(count, 1);
  for (std::size_t i = 0; i < data.size(); ++i) {
    if (data[i] != value(i, ranks_ * (ranks_ + 1) / 2)) {
      throw std::runtime_error(contestant.name + ": element " + std::to_string(i) + " is wrong");
    }
  }
  barrier();
  std::fill(data.begin(), data.end(), 0.0F);
  barrier();
}

std::vector<std::vector<double>> Stand::race(const std::vector<Contestant>& contestants,
                                             std::size_t count) {
  std::vector<Plan> plans(contestants.size());
  for (std::size_t c = 0; c < contestants.size(); ++c) {
    if (!contestants[c].run) continue;
    verify(contestants[c], count);
    auto& [iterations, batches] = plans[c];
    double each = 0;
    while (true) {  // the best of three, so that a hiccup does not look like slow work
      each = batch(contestants[c], count, iterations);
      for (int i = 0; i < 2 && each * static_cast<double>(iterations) < 20 * batch_us; ++i) {
        each = std::min(each, batch(contestants[c], count, iterations));
      }
      const double have = each * static_cast<double>(iterations);
      if (have >= 0.8 * batch_us) break;
      iterations *= static_cast<std::size_t>(std::clamp(batch_us / have, 2.0, 16.0));
    }
    batches =
        static_cast<std::size_t>(std::max(1.0, turn_us / (each * static_cast<double>(iterations))));
  }
  std::vector<std::vector<double>> times(contestants.size());
  double used_us = 0;  // the same on all ranks, so that all stop together
  for (int turn = 0; turn < least_turns || (turn < most_turns && used_us < race_us); ++turn) {
    for (std::size_t c = 0; c < contestants.size(); ++c) {
      if (!contestants[c].run) continue;
      contestants[c].run(count, 1);  // the caches are still the last contestant's
      for (std::size_t b = 0; b < plans[c].batches; ++b) {
        times[c].push_back(batch(contestants[c], count, plans[c].iterations));
        used_us += times[c].back() * static_cast<double>(plans[c].iterations);
      }
    }
  }
  return times;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Times summary(const std::vector<double>& values) {
  if (values.empty()) return {};
  return {true, median(values), *std::min_element(values.begin(), values.end())};
}

}  // namespace bench
