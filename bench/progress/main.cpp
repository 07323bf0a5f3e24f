// SPDX-License-Identifier: Apache-2.0
// Who should advance asynchronous all-reduces: the rank itself (Callers) or a thread
// (HelperThread)? A step is four layers of arithmetic, 2 ms each, with a bucket to be averaged
// after each; it ends when all buckets are averaged. Two ranks as processes; a step counts from the
// first rank's start to the last one's end. All ways take turns, in rounds; the helper lives only
// for its own turns.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "load.hpp"
#include "lockstep/detail/core/bytes.hpp"
#include "measure.hpp"
#include "step.hpp"

namespace {

using namespace bench;
using namespace lockstep::literals;
using lockstep::Callers;
using lockstep::HelperThread;
using lockstep::detail::shm::Engine;

constexpr std::size_t ranks = 2;
constexpr std::array<std::size_t, 2> bucket_sizes = {1_MiB, 16_MiB};
constexpr std::size_t rounds = 5;
constexpr std::chrono::microseconds layer_time{2000};
constexpr std::chrono::seconds time_limit{300};

enum Way : std::size_t { alone, blocking, callers, polled, helper, ways };
constexpr std::array<const char*, ways> names = {"compute alone", "blocking, after compute",
                                                 "Callers, waits at the end",
                                                 "Callers, polls between slices", "HelperThread"};

/// Lies in shared memory; rank 0 writes it.
struct Common {
  Track track;
  std::size_t passes;
  std::array<std::array<Times, ways>, bucket_sizes.size()> results;
};

template <class Who>
Contestant contestant(const char* name, Step<Who>& step, How how) {
  return {name, {}, [&step, how](std::size_t, std::size_t iterations) {
            for (std::size_t i = 0; i < iterations; ++i) step.run(how);
          }};
}

/// The buckets must hold the average, whoever made it.
template <class Who>
void check_averages(Step<Who>& step, How how, std::size_t rank) {
  for (std::size_t layer = 0; layer < layers; ++layer)
    std::ranges::fill(step.bucket(layer), static_cast<float>(rank + layer));
  step.run(how);
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const float expected = static_cast<float>(layer) + 0.5f;
    const auto bucket = step.bucket(layer);
    const auto wrong = std::ranges::find_if(bucket, [&](float x) { return x != expected; });
    lockstep::detail::check(wrong == bucket.end(), "the average is wrong");
  }
}

void append(std::vector<double>& all, const std::vector<double>& some) {
  all.insert(all.end(), some.begin(), some.end());
}

/// One rank's part: the times of all ways.
std::array<std::vector<double>, ways> measure(Common& common, std::size_t rank, std::size_t bytes,
                                              const std::array<std::string, rounds + 1>& files) {
  Stand stand(common.track, rank, ranks);
  Compute compute;
  if (rank == 0) common.passes = compute.calibrate(layer_time / slices);
  stand.barrier();
  const auto join = [&]<class Who>(Who, const std::string& address) {
    return typename Step<Who>::Communicator(lockstep::Rank{rank}, lockstep::WorldSize{ranks},
                                            Engine::open(address), std::chrono::minutes(1));
  };
  const std::size_t count = bytes / sizeof(float);
  auto comm = join(Callers{}, files[rounds]);
  Step<Callers> step(comm, compute, common.passes, count);
  check_averages(step, How::at_the_end, rank);
  check_averages(step, How::polled, rank);

  std::array<std::vector<double>, ways> times;
  for (std::size_t round = 0; round < rounds; ++round) {
    const auto own = stand.race({contestant(names[alone], step, How::no_communication),
                                 contestant(names[blocking], step, How::blocking),
                                 contestant(names[callers], step, How::at_the_end),
                                 contestant(names[polled], step, How::polled)},
                                count);
    for (std::size_t way = alone; way <= polled; ++way) append(times[way], own[way]);
    auto helped_comm = join(HelperThread{}, files[round]);
    Step<HelperThread> helped(helped_comm, compute, common.passes, count);
    check_averages(helped, How::at_the_end, rank);
    append(times[helper],
           stand.race({contestant(names[helper], helped, How::at_the_end)}, count)[0]);
    stand.barrier();
  }
  return times;
}

void report(const std::array<std::array<Times, ways>, bucket_sizes.size()>& results) {
  nlohmann::json rows = nlohmann::json::array();
  std::printf(
      "| buckets | way | median (us) | min | over compute alone |\n|---|---|---|---|---|\n");
  for (std::size_t s = 0; s < bucket_sizes.size(); ++s) {
    const std::string size =
        std::to_string(layers) + " x " + std::to_string(bucket_sizes[s] / 1_MiB) + " MiB";
    const auto& times = results[s];
    for (std::size_t way = 0; way < ways; ++way) {
      const double ratio = times[way].median / times[alone].median;
      std::printf("| %s | %s | %.0f | %.0f | %.3f |\n", size.c_str(), names[way], times[way].median,
                  times[way].minimum, ratio);
      rows.push_back({{"measure", "step, us, W=2, " + size + ", " + names[way]},
                      {"lockstep", times[way].median},
                      {"peer", times[alone].median},
                      {"ratio", ratio},
                      {"target", nullptr},
                      {"met", true}});
    }
  }
  std::printf("\n");
  for (std::size_t s = 0; s < bucket_sizes.size(); ++s) {
    const auto first = results[s].begin() + blocking;
    const auto best = std::min_element(first, results[s].end(),
                                       [](auto& a, auto& b) { return a.median < b.median; });
    std::printf("%zu MiB: %s wins\n", bucket_sizes[s] / 1_MiB,
                names[static_cast<std::size_t>(best - results[s].begin())]);
  }
  std::ofstream(LOCKSTEP_SOURCE_DIR "/build/bench/progress.json") << rows.dump(2) << "\n";
}

}  // namespace

int main() try {
  const Clock::time_point deadline = Clock::now() + time_limit;
  const SharedMemory memory(sizeof(Common));
  Common& common = *memory.as<Common>();
  std::printf("a step of %zu layers, %zu ranks as processes on %zu cores\n\n", layers, ranks,
              cores());
  const OthersLoad others;
  for (std::size_t s = 0; s < bucket_sizes.size(); ++s) {
    std::vector<lockstep::detail::Descriptor> files;  // open until all ranks have joined
    std::array<std::string, rounds + 1> addresses;
    for (std::string& address : addresses) {
      files.push_back(Engine::make_file(lockstep::WorldSize{ranks}));
      address = Engine::address(files.back());
    }
    run_ranks(ranks, deadline, [&](std::size_t rank) {
      const auto times = measure(common, rank, bucket_sizes[s], addresses);
      for (std::size_t way = 0; rank == 0 && way < ways; ++way)
        common.results[s][way] = summary(times[way]);
    });
  }
  report(common.results);
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench progress: %s\n", error.what());
  return 1;
}
