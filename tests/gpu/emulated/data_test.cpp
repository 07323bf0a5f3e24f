// SPDX-License-Identifier: Apache-2.0
// Data sets in GPU memory and pinned batches, on GPUs that the host plays.
#include "gpu/emulated/kernels.hpp"
//
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "gpu/data_checks.cuh"
#include "gpu/emulated/machine.hpp"
#include "lockstep/detail/data/pipeline.hpp"

BOOST_AUTO_TEST_SUITE(gpu_played_data)

namespace {

using namespace data_checks;

// What would be frozen is rejected, and what is the same in every epoch is not.
using Drawing = decltype(rows(1, 1) | map([](auto& sample, RandomStream& random) {
                           sample.label = static_cast<std::int32_t>(random.below(2));
                         }));
using Steady = decltype(rows(1, 1) | map([](auto& sample) { sample.label = 0; }));
static_assert(detail::changes_by_pass<Drawing>() && !detail::changes_by_pass<Steady>());
static_assert(!detail::changes_by_pass<ImageDataset>());
static_assert(Dataset<Pinned<Drawing>> && Dataset<DeviceResident<Steady>>);

// What comes behind a source changes nothing about that: a stage that hands the pass on draws not.
using Row = OwnedSample<double, std::int32_t>;
struct SteadySource {
  using sample_type = Row;
  static std::size_t size() { return 1; }
  void read(std::size_t, Row& out) const { out = {{1.}, 0}; }
};
struct DrawingSource : SteadySource {
  void read(std::size_t, Pass pass, Row& out) const {
    out = {{1.}, static_cast<std::int32_t>(pass.epoch.value())};
  }
};
constexpr auto keep = [](auto&) {};
using Stacked = decltype(SteadySource{} | stacked());
using StackedSteady = decltype(std::declval<Steady>() | stacked());
static_assert(!detail::changes_by_pass<Stacked>() && !detail::changes_by_pass<StackedSteady>());
static_assert(Dataset<DeviceResident<Stacked>> && Dataset<DeviceResident<StackedSteady>>);
static_assert(detail::changes_by_pass<decltype(std::declval<Drawing>() | stacked())>());
static_assert(detail::changes_by_pass<decltype(std::declval<Drawing>() | map(keep))>());
static_assert(detail::changes_by_pass<decltype(DrawingSource{} | stacked())>());
static_assert(detail::changes_by_pass<decltype(DrawingSource{} | map(keep))>());

/// The calls that so many steps make.
template <class Step>
emulated::Tally calls_of(auto& comm, std::size_t steps, const Step& step) {
  comm.synchronize();
  emulated::take_tally();
  for (std::size_t i = 0; i < steps; ++i) step();
  return emulated::take_tally();
}

}  // namespace

BOOST_AUTO_TEST_CASE(batches_are_those_of_the_hosts_loader) {
  const emulated::Machine machine(1);
  compare_all_batches();
  load_by_hand();
}

BOOST_AUTO_TEST_CASE(ranks_train_on_them_as_on_the_hosts_batches) {
  for (const std::size_t gpus : {1, 2}) {
    const emulated::Machine machine(gpus);
    train_with_all_batches(2);
  }
}

BOOST_AUTO_TEST_CASE(replicas_train_on_them_as_on_the_hosts_batches) {
  const emulated::Machine machine(2);
  train_replicas_with_all_batches(2);
}

// In front of every sixteenth captured step on a resident data set sixteen batches are gathered by
// one kernel. Nothing is copied, and no other call is made.
BOOST_AUTO_TEST_CASE(replayed_steps_share_a_gather) {
  const emulated::Machine machine(1);
  thread_ranks::expect_all_fine(thread_ranks::run(1, [](auto& comm) {
    const auto data = rows(400, 7);
    const DeviceResident resident(data);
    DistributedSampler<> sampler(data.size(), WorldSize{1}, Rank{0});
    DataLoader loader(resident, sampler, {.batch_size = 4});
    Ddp<std::remove_reference_t<decltype(comm)>> ddp(comm, network());
    auto at = loader.begin();
    for (int i = 0; i < 32; ++i, ++at) ddp.step(*at);
    const auto gathered = calls_of(comm, 32, [&] {
      ddp.step(*at);
      ++at;
    });

    BatchUpload<LabelledBatch<double, std::int32_t>> upload;
    LabelledBatch<double, std::int32_t> batch;
    data.load(std::vector<std::size_t>{1, 2, 3, 4}, batch);
    const DeviceBatch<double, std::int32_t> there = upload(batch, comm.gpu().stream());
    for (int i = 0; i < 8; ++i) ddp.step(there);
    const auto plain = calls_of(comm, 32, [&] { ddp.step(there); });
    struct Calls {
      const char* name;
      std::size_t more;
    };
    for (const auto& [call, more] :
         {Calls{"launch", 2}, Calls{"cudaGraphLaunch", 0}, Calls{"cudaMemcpyAsync", 0},
          Calls{"cudaEventRecord", 0}, Calls{"cudaStreamWaitEvent", 0}, Calls{"cudaMalloc", 0}}) {
      require(gathered.of(call) == plain.of(call) + more,
              std::string(call) + ": " + std::to_string(gathered.of(call)) + " instead of " +
                  std::to_string(plain.of(call) + more));
    }
    require(plain.of("cudaGraphLaunch") == 32, "steps were not replayed");
  }));
}

BOOST_AUTO_TEST_CASE(samples_without_inputs_are_rejected) {
  const emulated::Machine machine(1);
  std::string words;
  try {
    const DeviceResident empty(InMemoryDataset<double, std::int32_t>({}, {0, 1}));
  } catch (const Error& error) {
    words = error.what();
  }
  BOOST_TEST(words.find("DeviceResident: samples of 0 columns") != std::string::npos, words);
}

BOOST_AUTO_TEST_SUITE_END()
