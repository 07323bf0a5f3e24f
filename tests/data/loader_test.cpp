// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/loader.hpp"

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/data/in_memory_dataset.hpp"

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
      BOOST_CHECK_EXCEPTION(iterate(), std::runtime_error, [](const std::runtime_error& error) {
        return error.what() == std::string("sample 31");
      });
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

BOOST_AUTO_TEST_CASE(options_that_make_no_sense_are_refused) {
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

BOOST_AUTO_TEST_SUITE_END()
