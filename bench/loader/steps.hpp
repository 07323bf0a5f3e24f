// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A step with its loader, over the step alone.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "augment.hpp"
#include "comparison_table.hpp"
#include "files.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/pipeline.hpp"
#include "lockstep/lockstep.hpp"
#include "measure.hpp"
#include "mlp.hpp"

namespace bench {

/// Batches without end: epoch after epoch.
template <class Source>
class Stream {
 public:
  Stream(const Source& source, std::size_t rank, std::size_t ranks, LoaderOptions options)
      : sampler_(source.size(), WorldSize{ranks}, Rank{rank}), loader_(source, sampler_, options) {}

  const auto& next() {
    if (at_) ++*at_;
    if (!at_ || *at_ == std::default_sentinel) {
      sampler_.set_epoch(Epoch{epoch_++});
      at_.emplace(loader_.begin());
    }
    return **at_;
  }

 private:
  using Loader = DataLoader<Source, DistributedSampler<>>;

  DistributedSampler<> sampler_;
  Loader loader_;
  std::optional<typename Loader::Iterator> at_;
  std::uint64_t epoch_ = 0;
};

/// Example 03's step on so many ranks: on one batch that is there, and on those of loaders.
inline void measure_steps(ComparisonTable& table, const Samples& samples, std::size_t ranks) {
  constexpr std::size_t batch_size = 64;
  constexpr std::size_t most_ways = 16;
  struct Common {
    Track track;
    Times times[most_ways];
  };
  const std::vector<std::size_t> workers = {0, 1, 2};
  const SharedMemory memory(sizeof(Common));
  Common& common = *memory.as<Common>();
  const auto file = lockstep::detail::shm::Engine::make_file(WorldSize{ranks});
  const std::string address = lockstep::detail::shm::Engine::address(file);
  const InMemoryDataset<float, std::int32_t> plain(samples.inputs, samples.labels);
  const auto augmented = plain | augmenting();
  run_ranks(ranks, Clock::now() + std::chrono::minutes(5), [&](std::size_t rank) {
    ShmCommunicator<> comm(Rank{rank}, WorldSize{ranks},
                           lockstep::detail::shm::Engine::open(address), std::chrono::minutes(1));
    DistributedDataParallel<Mlp<float, 784, 256, 10>> ddp(comm);
    ddp.optimizer().lr = 0.01;
    Samples one;
    samples.slice(0, batch_size, one);
    std::vector<Contestant> contestants;
    const auto compete = [&](auto next) {
      contestants.push_back({"step", {}, [&ddp, next](std::size_t, std::size_t iterations) {
                               for (std::size_t i = 0; i != iterations; ++i) ddp.step(next());
                             }});
    };
    compete([&one]() -> const Samples& { return one; });
    const auto load = [&]<class Source>(const Source& source) {
      for (const std::size_t count : workers) {
        const LoaderOptions options{.batch_size = batch_size, .workers = count};
        const auto stream = std::make_shared<Stream<Source>>(source, rank, ranks, options);
        compete([stream]() -> const Samples& { return stream->next(); });
      }
    };
    load(plain);
    load(augmented);
    Stand stand(common.track, rank, ranks);
    const auto times = stand.race(contestants, 0);
    if (rank != 0) return;
    for (std::size_t i = 0; i != times.size(); ++i) common.times[i] = summary(times[i]);
  });
  std::size_t way = 0;
  for (const char* source : {"memory", "memory, augmented"}) {
    for (const std::size_t count : workers) {
      table.row("step of the MLP, batch 64, W=" + std::to_string(ranks) + ", from " + source +
                    ", workers " + std::to_string(count) + " / step alone",
                common.times[++way], common.times[0], 1.03, true);
    }
  }
}

}  // namespace bench
