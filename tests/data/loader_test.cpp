// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/data/loader.hpp"

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdint>
#include <exception>
#include <numeric>
#include <ostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/pipeline.hpp"
#include "message_of.hpp"
#include "thread_count.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(data_loader)

namespace {

using Numbers = InMemoryDataset<float, std::int32_t>;

/// Sample i is the row {2i, 2i+1} with label i.
Numbers numbers(std::size_t n) {
  std::vector<float> inputs(2 * n);
  std::vector<std::int32_t> labels(n);
  std::iota(inputs.begin(), inputs.end(), 0.f);
  std::iota(labels.begin(), labels.end(), 0);
  return {std::move(inputs), std::move(labels)};
}

/// Slow and uneven, so that later batches are ready before earlier ones; fails on request.
struct Uneven {
  struct Labels {
    std::vector<std::size_t> labels;
  };
  using batch_type = Labels;
  std::size_t samples;
  std::size_t broken = static_cast<std::size_t>(-1);
  mutable std::atomic<std::size_t> loads = 0;

  std::size_t size() const { return samples; }
  void load(std::span<const std::size_t> indices, Labels& out) const {
    ++loads;
    if (indices[0] / indices.size() % 2 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(300));
    out.labels.assign(indices.begin(), indices.end());
    for (std::size_t index : indices)
      if (index == broken) throw std::runtime_error("sample " + std::to_string(index));
  }
};

template <class Loader>
std::vector<std::int32_t> labels(Loader& loader) {
  std::vector<std::int32_t> all;
  for (const auto& batch : loader) {
    for (std::size_t i = 0; i < batch.labels.size(); ++i)
      all.push_back(static_cast<std::int32_t>(batch.labels[i]));
    all.push_back(-1);  // where a batch ends
  }
  return all;
}

}  // namespace

BOOST_AUTO_TEST_CASE(batches_hold_the_rows_of_the_samplers_draws) {
  const Numbers dataset = numbers(10);
  DistributedSampler<> sampler(10, WorldSize{2}, Rank{1});
  DataLoader loader(dataset, sampler, {.batch_size = 2});
  BOOST_TEST(loader.size() == 3u);
  std::size_t draw = 0;
  std::vector<std::size_t> sizes;
  for (const auto& batch : loader) {
    BOOST_TEST(batch.width == 2u);
    BOOST_TEST(batch.weights.size() == batch.size());
    for (std::size_t i = 0; i < batch.size(); ++i, ++draw) {
      const std::size_t sample = sampler[draw];
      BOOST_TEST(batch.labels[i] == static_cast<std::int32_t>(sample));
      BOOST_TEST(batch.row(i)[0] == 2.f * static_cast<float>(sample));
      BOOST_TEST(batch.row(i)[1] == 2.f * static_cast<float>(sample) + 1.f);
      BOOST_TEST(batch.weights[i] == 1.f);
    }
    sizes.push_back(batch.size());
  }
  BOOST_TEST(sizes == (std::vector<std::size_t>{2, 2, 1}));
}

BOOST_AUTO_TEST_CASE(a_last_batch_that_is_not_full_can_be_dropped) {
  const Numbers dataset = numbers(10);
  DistributedSampler<Padding, InOrder> sampler(10, WorldSize{1}, Rank{0});
  DataLoader loader(dataset, sampler, {.batch_size = 4, .drop_last = true});
  BOOST_TEST(loader.size() == 2u);
  BOOST_TEST(labels(loader) == (std::vector<std::int32_t>{0, 1, 2, 3, -1, 4, 5, 6, 7, -1}));
}

BOOST_AUTO_TEST_CASE(the_number_of_workers_changes_nothing) {
  const Uneven dataset{.samples = 200};
  DistributedSampler<> sampler(200, WorldSize{1}, Rank{0});
  DataLoader plain(dataset, sampler, {.batch_size = 7, .workers = 0});
  DataLoader one(dataset, sampler, {.batch_size = 7, .workers = 1});
  DataLoader three(dataset, sampler, {.batch_size = 7, .workers = 3, .prefetch = 1});
  DataLoader deep(dataset, sampler, {.batch_size = 7, .workers = 3, .prefetch = 20});
  for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
    sampler.set_epoch(Epoch{epoch});
    const auto expected = labels(plain);
    BOOST_TEST(expected.size() == 200u + 29u);
    BOOST_TEST(labels(one) == expected);
    BOOST_TEST(labels(three) == expected);
    BOOST_TEST(labels(deep) == expected);
  }
}

BOOST_AUTO_TEST_CASE(duplicates_have_weight_0_under_masked) {
  const Numbers dataset = numbers(5);
  float weight = 0;
  for (std::size_t r = 0; r < 4; ++r) {
    DistributedSampler<Masked> sampler(5, WorldSize{4}, Rank{r});
    DataLoader loader(dataset, sampler, {.batch_size = 8});
    for (const auto& batch : loader) {
      BOOST_TEST(batch.size() == 2u);
      weight = std::accumulate(batch.weights.begin(), batch.weights.end(), weight);
    }
  }
  BOOST_TEST(weight == 5.f);
}

BOOST_AUTO_TEST_CASE(leaving_early_or_never_iterating_is_clean) {
  const Uneven dataset{.samples = 100};
  DistributedSampler<Padding, InOrder> sampler(100, WorldSize{1}, Rank{0});
  for (std::size_t workers : {0u, 1u, 3u}) {
    const DataLoader unused(dataset, sampler, {.batch_size = 3, .workers = workers});
    DataLoader loader(dataset, sampler, {.batch_size = 3, .workers = workers, .prefetch = 4});
    for (int i = 0; i < 3; ++i) {
      for (const auto& batch : loader) {
        BOOST_TEST(batch.labels[0] == 0u);  // each time from the start, as in PyTorch
        break;
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(resuming_begins_at_the_first_batch_that_was_not_given_out) {
  const Uneven dataset{.samples = 100};
  DistributedSampler<> sampler(100, WorldSize{2}, Rank{1});
  DataLoader loader(dataset, sampler, {.batch_size = 8, .workers = 2});
  sampler.set_epoch(Epoch{4});
  const auto whole = labels(loader);

  std::vector<std::int32_t> seen;
  SamplerState checkpoint;
  for (const auto& batch : loader) {
    for (std::size_t label : batch.labels) seen.push_back(static_cast<std::int32_t>(label));
    seen.push_back(-1);
    checkpoint = loader.state();
    if (checkpoint.position == 24) break;
  }
  DistributedSampler<> later(100, WorldSize{2}, Rank{1});
  DataLoader again(dataset, later, {.batch_size = 8, .workers = 2});
  again.resume(checkpoint);
  for (std::uint64_t epoch = later.epoch().value(); epoch < 5; ++epoch) {
    later.set_epoch(Epoch{epoch});
    for (std::int32_t label : labels(again)) seen.push_back(label);
  }
  BOOST_TEST(seen == whole);
}

BOOST_AUTO_TEST_CASE(an_epoch_resumed_at_its_end_is_over) {
  const Numbers dataset = numbers(10);
  DistributedSampler<> sampler(10, WorldSize{1}, Rank{0});
  DataLoader loader(dataset, sampler, {.batch_size = 4, .drop_last = true});
  labels(loader);
  loader.resume(loader.state());
  BOOST_TEST(labels(loader).empty());
  BOOST_TEST(labels(loader).size() == 10u);
}

BOOST_AUTO_TEST_CASE(what_a_worker_throws_is_thrown_where_its_batch_was_due) {
  const Uneven dataset{.samples = 60, .broken = 31};
  DistributedSampler<Padding, InOrder> sampler(60, WorldSize{1}, Rank{0});
  for (std::size_t workers : {0u, 1u, 3u}) {
    DataLoader loader(dataset, sampler, {.batch_size = 10, .workers = workers});
    for (int i = 0; i < 2; ++i) {
      std::size_t batches = 0;
      const auto iterate = [&] {
        for (const auto& batch : loader) batches += batch.labels.size() == 10;
      };
      BOOST_TEST(
          message_of(iterate).find("samples 30, 31, 32, ... 39 (batch 3 of epoch 0): sample 31;") !=
          std::string::npos);
      BOOST_TEST(batches == 3u);
      BOOST_TEST(loader.state().position == 30u);
    }
  }
}

BOOST_AUTO_TEST_CASE(a_failed_epoch_is_over) {
  const Uneven dataset{.samples = 10, .broken = 0};
  DistributedSampler<Padding, InOrder> sampler(10, WorldSize{1}, Rank{0});
  DataLoader loader(dataset, sampler, {.batch_size = 2});
  BOOST_CHECK_THROW(loader.begin(), std::runtime_error);
}

BOOST_AUTO_TEST_CASE(buffers_are_used_again) {
  const Numbers dataset = numbers(64);
  DistributedSampler<> sampler(64, WorldSize{1}, Rank{0});
  DataLoader loader(dataset, sampler, {.batch_size = 4, .workers = 1, .prefetch = 2});
  std::vector<const float*> seen;
  for (const auto& batch : loader) {
    const float* const memory = batch.inputs.data();
    if (std::find(seen.begin(), seen.end(), memory) == seen.end()) seen.push_back(memory);
  }
  BOOST_TEST(seen.size() <= 3u);
}

BOOST_AUTO_TEST_CASE(options_that_make_no_sense_are_rejected) {
  const Numbers dataset = numbers(8);
  DistributedSampler<> sampler(8, WorldSize{1}, Rank{0});
  DistributedSampler<> other(9, WorldSize{1}, Rank{0});
  using Loader = DataLoader<Numbers, DistributedSampler<>>;
  BOOST_CHECK_THROW(Loader(dataset, sampler, {.batch_size = 0}), Error);
  BOOST_CHECK_THROW(Loader(dataset, sampler, {.workers = 1, .prefetch = 0}), Error);
  BOOST_CHECK_EXCEPTION(Loader(dataset, other, {}), Error, [](const Error& error) {
    return error.problem() == "the sampler draws from 9 samples and the data set has 8";
  });
}

namespace {

/// What `for_each_case` below says about a stream: the label and what was drawn, of every sample.
struct Drawn {
  std::int32_t label;
  float value;
  friend bool operator==(const Drawn&, const Drawn&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Drawn& drawn) {
    return out << drawn.label << ':' << drawn.value;
  }
};

/// Draws a number for every sample, and takes a time for it that has nothing to do with it. With
/// `broken`, that sample cannot be changed.
auto drawing(const Numbers& dataset, std::size_t broken = static_cast<std::size_t>(-1)) {
  return dataset | map<OwnedSample<float, std::int32_t>>([broken](const auto& sample, auto& out,
                                                                  auto& random) {
           thread_local RandomStream delays(Seed{0});
           for (std::uint64_t n = delays.below(8) == 0 ? delays.below(50) : 0; n != 0; --n)
             std::this_thread::yield();
           if (static_cast<std::size_t>(sample.label) == broken)
             throw std::range_error("it is broken");
           out.inputs.assign(sample.inputs.begin(), sample.inputs.end());
           out.inputs.push_back(random.template uniform<float>());
           out.label = sample.label;
         });
}

template <class Loader>
void append(Loader& loader, std::vector<Drawn>& out, std::size_t batches) {
  for (const auto& batch : loader) {
    for (std::size_t i = 0; i != batch.size(); ++i)
      out.push_back({batch.labels[i], batch.row(i)[2]});
    if (--batches == 0) break;
  }
}

constexpr std::size_t all_batches = static_cast<std::size_t>(-1);

}  // namespace

/// Worlds, workers, prefetch and batch sizes change nothing but which rank gets a sample and where
/// a batch ends; nor does an interruption, after which another number of ranks and workers goes on.
BOOST_AUTO_TEST_CASE(the_stream_of_samples_depends_on_seed_and_epoch_alone) {
  RandomStream chance(Seed{19});
  for (std::size_t round = 0; round != 8; ++round) {
    const std::size_t n = 12 * (1 + chance.below(8));  // divides by all worlds
    const Numbers numbers_of_round = numbers(n);
    const auto dataset = drawing(numbers_of_round);
    const SamplerOptions seeded{.seed = Seed{chance.below(5)}};
    const Epoch epoch{chance.below(5)};
    const Pass pass{seeded.seed, epoch};

    // The whole epoch as one rank sees it, without a loader.
    DistributedSampler<> alone(n, WorldSize{1}, Rank{0}, seeded);
    alone.set_epoch(epoch);
    std::vector<Drawn> expected;
    for (std::size_t k = 0; k != n; ++k) {
      RandomStream random(detail::sample_seed(pass, alone[k], 0));
      expected.push_back({static_cast<std::int32_t>(alone[k]), random.uniform<float>()});
    }

    for (const std::size_t workers : {0u, 1u, 2u, 4u}) {
      const std::size_t world = 1 + (round + workers) % 4;
      const std::size_t later_world = 1 + chance.below(4);
      const LoaderOptions options{
          .batch_size = 1 + chance.below(9), .workers = workers, .prefetch = 1 + chance.below(4)};
      const std::size_t before = chance.below(n / world / options.batch_size + 1);
      std::vector<Drawn> seen(n);
      const auto index = [&](const std::vector<Drawn>& part, std::size_t first, std::size_t rank,
                             std::size_t ranks) {
        for (std::size_t k = 0; k != part.size(); ++k) seen[first + k * ranks + rank] = part[k];
      };
      SamplerState state;
      for (std::size_t r = 0; r != world; ++r) {
        DistributedSampler<> sampler(n, WorldSize{world}, Rank{r}, seeded);
        sampler.set_epoch(epoch);
        DataLoader loader(dataset, sampler, options);
        std::vector<Drawn> part;
        if (before != 0) append(loader, part, before);
        index(part, 0, r, world);
        state = loader.state();
      }
      const std::size_t over = state.position * world;
      for (std::size_t r = 0; over != n && r != later_world; ++r) {
        DistributedSampler<> sampler(n, WorldSize{later_world}, Rank{r}, seeded);
        DataLoader loader(dataset, sampler, {.batch_size = 5, .workers = 2});
        loader.resume(state);
        std::vector<Drawn> part;
        append(loader, part, all_batches);
        if (over + (part.size() - 1) * later_world + r >= n) part.pop_back();  // it was padded
        index(part, over, r, later_world);
      }
      BOOST_TEST(seen == expected, boost::test_tools::per_element());
    }
  }
}

BOOST_AUTO_TEST_CASE(a_transform_that_throws_names_its_sample_for_any_number_of_workers) {
  const Numbers numbers_60 = numbers(60);
  const auto dataset = drawing(numbers_60, 31);
  DistributedSampler<Padding, InOrder> sampler(60, WorldSize{1}, Rank{0});
  sampler.set_epoch(Epoch{2});
  for (const std::size_t workers : {0u, 1u, 2u, 4u}) {
    DataLoader loader(dataset, sampler, {.batch_size = 4, .workers = workers});
    for (int i = 0; i < 2; ++i) {
      std::vector<Drawn> seen;
      try {
        append(loader, seen, all_batches);
        BOOST_ERROR("nothing was thrown");
      } catch (const Error& error) {
        BOOST_TEST(error.problem() == "sample 31 (draw 3 of batch 7 of epoch 2): it is broken");
        BOOST_CHECK_THROW(std::rethrow_if_nested(error), std::range_error);
      }
      BOOST_TEST(seen.size() == 28u);
    }
  }
}

/// A batch that knows how many of its kind there are.
struct Counted {
  static inline std::atomic<int> live = 0;
  static inline std::atomic<int> most = 0;
  std::vector<std::int32_t> labels;

  Counted() {
    const int now = ++live;
    for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
    }
  }
  Counted(const Counted&) = delete;
  ~Counted() { --live; }
};

BOOST_AUTO_TEST_CASE(batches_are_as_many_as_the_depth_and_stay_where_they_are) {
  const Numbers numbers_200 = numbers(200);
  const auto dataset = drawing(numbers_200) | collate<Counted>([](auto samples, Counted& out) {
                         out.labels.clear();
                         for (const auto& sample : samples) out.labels.push_back(sample.label);
                       });
  DistributedSampler<> sampler(200, WorldSize{1}, Rank{0});
  for (const std::size_t workers : {0u, 1u, 3u}) {
    Counted::most = 0;
    {
      DataLoader loader(dataset, sampler, {.batch_size = 3, .workers = workers, .prefetch = 2});
      for (const auto& batch : loader) {
        const Counted* const index = &batch;
        const std::vector<std::int32_t> held = batch.labels;
        for (int i = 0; i != 3; ++i) std::this_thread::yield();  // workers go on meanwhile
        BOOST_TEST(held == batch.labels);
        BOOST_TEST(index == &batch);
      }
      BOOST_TEST(Counted::most <= static_cast<int>(workers * 2 + 1));
    }
    BOOST_TEST(Counted::live == 0);
  }
}

BOOST_AUTO_TEST_CASE(however_a_loop_ends_no_thread_is_left) {
  // Where a sanitizer has a thread of its own, it is there from the first other one on.
  std::jthread([] {}).join();
  const Numbers numbers_60 = numbers(60);
  const auto whole = drawing(numbers_60);
  const auto broken = drawing(numbers_60, 20);
  const std::size_t before = thread_count();
  for (std::size_t i = 0; i != 40; ++i) {
    DistributedSampler<Padding, InOrder> sampler(60, WorldSize{1}, Rank{0});
    const LoaderOptions options{.batch_size = 1 + i % 5, .workers = i % 5, .prefetch = 3};
    DataLoader loader(i % 2 == 0 ? whole : broken, sampler, options);
    if (i < 10) BOOST_TEST(thread_count() - before == i % 5);
    std::vector<Drawn> seen;
    if (i % 4 != 0) append(loader, seen, 1 + i % 3);  // a break
    if (i % 4 == 1) append(loader, seen, 2);          // and another
    if (i % 4 == 3) BOOST_CHECK_THROW(append(loader, seen, all_batches), Error);
  }
  BOOST_TEST(thread_count() == before);
}

BOOST_AUTO_TEST_SUITE_END()
