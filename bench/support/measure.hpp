// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Contestants that take turns, and how long their batches take.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "barrier.hpp"
#include "processes.hpp"

namespace bench {

inline constexpr std::size_t most_ranks = 8;

/// One way to do the work. Without `run`, it is not to be had here.
struct Contestant {
  std::string name;
  std::span<float> data;                                // what is reduced; empty if nothing is
  std::function<void(std::size_t, std::size_t)> run{};  // elements, how often
  bool has_threads = false;                             // which need the cores at the start
};

/// What the ranks share to measure together.
struct Track {
  struct alignas(128) Marks {
    Clock::time_point begin;
    Clock::time_point end;
  };

  Barrier barrier;
  std::array<Marks, most_ranks> marks;
};

/// One rank's stand at the track. All ranks see the same times and so take the same decisions.
class Stand {
 public:
  Stand(Track& track, std::size_t rank, std::size_t ranks)
      : track_(track), rank_(rank), ranks_(ranks) {}

  /// Waits for all ranks, asleep.
  void barrier() { track_.barrier.sleep(static_cast<std::uint32_t>(ranks_)); }

  /// Microseconds per iteration of every batch of every contestant, in turns: noise hits all alike.
  /// Nothing for those that are not to be had.
  std::vector<std::vector<double>> race(const std::vector<Contestant>& contestants,
                                        std::size_t count);

 private:
  /// From the first rank's start to the last one's end, per iteration.
  double batch(const Contestant& contestant, std::size_t count, std::size_t iterations);
  void verify(const Contestant& contestant, std::size_t count);

  Track& track_;
  std::size_t rank_;
  std::size_t ranks_;
};

struct Times {
  bool known;  // zero in fresh shared memory
  double median;
  double minimum;
};

double median(std::vector<double> values);
Times summary(const std::vector<double>& values);

}  // namespace bench
