// SPDX-License-Identifier: Apache-2.0
// A job's data in the order of BlockShuffle: the stream of samples is the sampler's whatever
// workers load it, and what one world has left of an epoch another one draws.
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/sampler.hpp"

BOOST_AUTO_TEST_SUITE(data_block_shuffle)

namespace {

using namespace lockstep;
using Samples = std::vector<std::size_t>;

/// Batches are lists of the samples that are in them.
struct Listed {
  struct Batch {
    Samples samples;
  };
  using batch_type = Batch;
  std::size_t samples;

  std::size_t size() const { return samples; }
  void load(std::span<const std::size_t> indices, Batch& out) const {
    out.samples.assign(indices.begin(), indices.end());
  }
};

using Blocks = DistributedSampler<Exact, BlockShuffle<16, 3>>;

/// A rank of a job.
struct RankOfJob {
  RankOfJob(const Listed& data, std::size_t world, std::size_t rank, Seed seed, Epoch epoch,
            LoaderOptions options)
      : sampler(data.size(), WorldSize{world}, Rank{rank}, {.seed = seed}),
        loader(data, sampler, options) {
    sampler.set_epoch(epoch);
  }

  /// At most so many batches of the epoch.
  Samples draw(std::size_t batches) {
    Samples drawn;
    if (batches == 0) return drawn;
    for (const auto& batch : loader) {
      drawn.insert(drawn.end(), batch.samples.begin(), batch.samples.end());
      if (--batches == 0) break;
    }
    return drawn;
  }

  Blocks sampler;
  DataLoader<Listed, Blocks> loader;
};

}  // namespace

BOOST_AUTO_TEST_CASE(workers_change_nothing_and_any_world_goes_on) {
  std::mt19937_64 random(29);
  constexpr std::size_t worker_counts[] = {0, 1, 2, 4};
  for (int i = 0; i < 12; ++i) {
    const Listed data{random() % 300};
    const Seed seed{random()};
    const Epoch epoch{random() % 9};
    const std::size_t batch_size = 1 + random() % 20;
    const auto ranks_of = [&](std::size_t world, std::size_t workers) {
      std::vector<std::unique_ptr<RankOfJob>> ranks;
      const LoaderOptions options{
          .batch_size = batch_size, .workers = workers, .prefetch = 1 + random() % 3};
      for (std::size_t rank = 0; rank != world; ++rank)
        ranks.push_back(std::make_unique<RankOfJob>(data, world, rank, seed, epoch, options));
      return ranks;
    };
    for (std::size_t world = 1; world <= 4; ++world) {
      BOOST_TEST_CONTEXT(data.samples << " samples, world of " << world << ", batches of "
                                      << batch_size) {
        Samples all;
        for (const std::size_t workers : worker_counts) {
          for (auto& rank : ranks_of(world, workers)) {
            Samples expected(rank->sampler.size());
            for (std::size_t k = 0; k != expected.size(); ++k) expected[k] = rank->sampler[k];
            const Samples drawn = rank->draw(data.size() + 1);
            BOOST_TEST_REQUIRE((drawn == expected));
            if (workers == 0) all.insert(all.end(), drawn.begin(), drawn.end());
          }
        }
        // A part of the epoch by this world, the rest by another one, with other workers.
        const std::size_t rest_world = 1 + random() % 4;
        auto ranks = ranks_of(world, worker_counts[random() % 4]);
        const std::size_t whole = ranks.back()->sampler.size() / batch_size;
        const std::size_t batches = random() % (whole + 1);
        Samples parts;
        for (auto& rank : ranks) {
          const Samples drawn = rank->draw(batches);
          parts.insert(parts.end(), drawn.begin(), drawn.end());
        }
        const SamplerState state = ranks.front()->loader.state();
        for (auto& rank : ranks_of(rest_world, worker_counts[random() % 4])) {
          rank->loader.resume(state);
          const Samples drawn = rank->draw(data.size() + 1);
          parts.insert(parts.end(), drawn.begin(), drawn.end());
        }
        std::sort(all.begin(), all.end());
        std::sort(parts.begin(), parts.end());
        Samples each(data.samples);
        std::iota(each.begin(), each.end(), std::size_t{0});
        BOOST_TEST_REQUIRE((all == each));
        BOOST_TEST_REQUIRE((parts == each));
      }
    }
  }
}

// What a disk reads, and how well samples are mixed.
BOOST_AUTO_TEST_CASE(a_window_has_some_whole_blocks_mixed_anew_in_every_window_and_epoch) {
  constexpr std::size_t block = 16;
  constexpr std::size_t window = 3 * block;
  const Listed data{12 * window};
  const auto epoch = [&](std::uint64_t number) {
    RankOfJob job(data, 1, 0, Seed{5}, Epoch{number}, {.batch_size = 10, .workers = 2});
    return job.draw(data.size());
  };
  const Samples drawn = epoch(0);
  BOOST_TEST((drawn != epoch(1)));
  BOOST_TEST_REQUIRE(drawn.size() == data.size());
  std::set<std::size_t> blocks;              // all that were read
  std::set<Samples> orders;                  // of places within blocks, in a window
  std::vector<std::size_t> first_of_window;  // the first block of each
  for (std::size_t begin = 0; begin != drawn.size(); begin += window) {
    Samples within(drawn.begin() + static_cast<std::ptrdiff_t>(begin),
                   drawn.begin() + static_cast<std::ptrdiff_t>(begin + window));
    BOOST_TEST(!std::ranges::is_sorted(within, {}, [](std::size_t i) { return i % block; }));
    std::set<std::size_t> here;
    Samples places;
    for (const std::size_t sample : within) {
      here.insert(sample / block);
      places.push_back(sample % block);
    }
    // Samples of a block are not read one after the other.
    std::size_t changes = 0;
    for (std::size_t i = 1; i != within.size(); ++i)
      changes += within[i] / block != within[i - 1] / block ? 1 : 0;
    BOOST_TEST(changes > 10);
    BOOST_TEST(here.size() == 3u);
    blocks.insert(here.begin(), here.end());
    orders.insert(places);
    first_of_window.push_back(*here.begin());
  }
  BOOST_TEST(blocks.size() == data.size() / block);  // so that no block is in two windows
  BOOST_TEST(orders.size() == data.size() / window);
  BOOST_TEST(!std::ranges::is_sorted(first_of_window));
}

BOOST_AUTO_TEST_SUITE_END()
