// SPDX-License-Identifier: Apache-2.0
// The part of a trace that GPUs measure, on GPUs that the host plays.
#include "gpu/emulated/kernels.hpp"
//
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "contents.hpp"
#include "gpu/emulated/machine.hpp"
#include "gpu/plain_mlp.cuh"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/trainer/cuda.cuh"
#include "lockstep/detail/trainer/launch_job.hpp"
#include "lockstep/detail/trainer/trainer.hpp"
#include "lockstep/trace.cuh"
#include "temporary_folder.hpp"

BOOST_AUTO_TEST_SUITE(gpu_played_trace)

namespace {

using namespace lockstep;
using namespace train;

constexpr std::size_t width = 5, classes = 3, steps = 6;
using Split = GpuSplitMlp<double, width, 6, classes>;

struct OnTrack {
  std::string name;
  double begin;
  double end;
};

/// A traced job of two ranks: what is on each rank's track of its GPU, in the order of begins.
template <class Job>
std::map<std::size_t, std::vector<OnTrack>> gpu_tracks() {
  const emulated::Machine machine(2);
  const TemporaryFolder folder;
  const std::string path = folder.path + "/trace.json";
  std::string words[] = {"program", "--ranks=2", "--progress=none", "--trace=" + path};
  char* argv[] = {words[0].data(), words[1].data(), words[2].data(), words[3].data()};
  const auto all = labelled<double>(reference_batch(8 * steps, width, classes, 0, 0));
  const InMemoryDataset<double, std::int32_t> data(all.inputs, all.labels);
  BOOST_TEST(launch<Job>(4, argv, [&](Job& job) {
               // The program's own current GPU is another than the rank's.
               const auto leave = [&] {
                 check_cuda(cudaSetDevice(1 - static_cast<int>(job.rank().value())), "leave");
               };
               leave();
               for (auto epoch : job.epochs(1)) {
                 leave();
                 for (const auto& batch : epoch.batches(data, 4)) {
                   leave();
                   job.step(batch);
                   leave();
                 }
               }
             }) == 0);
  std::map<std::size_t, std::vector<OnTrack>> tracks;
  const auto trace = nlohmann::json::parse(contents(path));
  for (const auto& event : trace.at("traceEvents")) {
    if (event.value("cat", "") != "gpu_user_annotation") continue;
    const double begin = event.at("ts");
    tracks[event.at("pid")].push_back(
        {event.at("name"), begin, begin + event.at("dur").get<double>()});
  }
  for (auto& [rank, track] : tracks)
    std::ranges::stable_sort(track, {}, [](const OnTrack& each) { return each.begin; });
  return tracks;
}

std::size_t count(const std::vector<OnTrack>& track, std::string_view name) {
  return static_cast<std::size_t>(
      std::ranges::count_if(track, [&](const auto& each) { return each.name.starts_with(name); }));
}

}  // namespace

BOOST_AUTO_TEST_CASE(phases_of_steps_are_on_a_track_of_the_gpu) {
  const auto tracks =
      gpu_tracks<Trainer<Split, Device<Cuda>, Backend<Shm>, Observers<Trace, GpuTrace>>>();
  BOOST_TEST_REQUIRE(tracks.size() == 2u);
  for (const auto& [rank, track] : tracks) {
    for (const char* phase : {"ProfilerStep", "forward", "backward", "optimizer.step"})
      BOOST_TEST(count(track, phase) == steps, rank << ": " << count(track, phase) << ' ' << phase);
    const OnTrack* whole = nullptr;
    for (const OnTrack& each : track) {
      BOOST_TEST(each.begin <= each.end);
      if (each.name.starts_with("ProfilerStep")) {
        if (whole != nullptr) BOOST_TEST(whole->end <= each.begin + 1);
        whole = &each;
      } else if (each.name != "DataLoader") {
        BOOST_TEST_REQUIRE(whole != nullptr);
        BOOST_TEST(each.end <= whole->end + 1, each.name << " goes on behind its step");
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(a_captured_step_is_one_span) {
  const auto tracks = gpu_tracks<
      Trainer<Split, Device<Cuda>, Backend<Shm>, CapturedStep, Observers<Trace, GpuTrace>>>();
  BOOST_TEST_REQUIRE(tracks.size() == 2u);
  for (const auto& [rank, track] : tracks) {
    BOOST_TEST(count(track, "ProfilerStep") == steps);
    BOOST_TEST(count(track, "backward") < steps);  // only those of steps that are not replayed
  }
}

BOOST_AUTO_TEST_SUITE_END()
