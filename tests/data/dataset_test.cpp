// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/data/dataset.hpp"

#include <array>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "image_dataset.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/hash.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(data_dataset)

namespace {

ImageDataset::batch_type all(const ImageDataset& dataset) {
  std::vector<std::size_t> indices(dataset.size());
  std::iota(indices.begin(), indices.end(), 0);
  ImageDataset::batch_type batch;
  dataset.load(indices, batch);
  return batch;
}

std::uint64_t hash_of_bytes(const ImageDataset& dataset) {
  detail::Hash hash;
  const auto batch = all(dataset);
  for (float x : batch.inputs) hash.number(static_cast<std::uint64_t>(x * 255.f + 0.5f));
  for (std::int32_t label : batch.labels) hash.number(static_cast<std::uint64_t>(label));
  return hash.value();
}

}  // namespace

BOOST_AUTO_TEST_CASE(rows_in_memory_are_loaded_in_the_order_asked_for) {
  const InMemoryDataset<float, int> dataset({1, 2, 3, 4, 5, 6}, {10, 20, 30});
  BOOST_TEST(dataset.size() == 3u);
  BOOST_TEST(dataset.width() == 2u);
  LabelledBatch<float, int> batch;
  dataset.load(std::vector<std::size_t>{2, 0, 2}, batch);
  BOOST_TEST(batch.size() == 3u);
  BOOST_TEST(batch.inputs == (std::vector<float>{5, 6, 1, 2, 5, 6}));
  BOOST_TEST(batch.labels == (std::vector<int>{30, 10, 30}));
  BOOST_TEST(batch.weights == (std::vector<float>{1, 1, 1}));
  dataset.load(std::vector<std::size_t>{1}, batch);
  BOOST_TEST(batch.size() == 1u);
  BOOST_TEST(batch.row(0)[1] == 4.f);
}

BOOST_AUTO_TEST_CASE(rows_come_from_any_contiguous_range) {
  const std::array<float, 4> inputs{1, 2, 3, 4};
  const int labels[] = {7, 8};
  const std::vector<int> more{7, 8};
  const auto is_right = [](const InMemoryDataset<float, int>& data) {
    LabelledSample<float, int> sample;
    data.read(1, sample);
    return data.size() == 2 && sample.inputs[1] == 4 && sample.label == 8;
  };
  BOOST_TEST(is_right(InMemoryDataset(inputs, labels)));
  BOOST_TEST(is_right(InMemoryDataset(std::span(inputs), more)));
  BOOST_TEST(is_right(InMemoryDataset(std::vector<float>(inputs.begin(), inputs.end()), more)));
}

BOOST_AUTO_TEST_CASE(inputs_that_are_no_whole_rows_are_rejected) {
  const auto make = [](std::vector<float> inputs, std::vector<int> labels) {
    return InMemoryDataset<float, int>(std::move(inputs), std::move(labels));
  };
  BOOST_CHECK_EXCEPTION(make({1, 2, 3, 4, 5}, {1, 2}), Error, [](const Error& error) {
    return error.problem() == "5 inputs are no whole rows for 2 labels";
  });
  BOOST_CHECK_THROW(make({1}, {}), Error);
  BOOST_TEST(make({}, {}).size() == 0u);
}

BOOST_AUTO_TEST_CASE(generated_sets_are_the_same_everywhere_and_differ_by_split_and_seed) {
  GeneratedOptions options{.samples = 50, .width = 31, .classes = 7};
  BOOST_TEST(hash_of_bytes(generated_dataset("train", options)) == 6187907903126086881u);
  BOOST_TEST(hash_of_bytes(generated_dataset("train", options)) !=
             hash_of_bytes(generated_dataset("test", options)));
  GeneratedOptions other = options;
  other.seed = Seed{1};
  BOOST_TEST(hash_of_bytes(generated_dataset("train", options)) !=
             hash_of_bytes(generated_dataset("train", other)));
  options.classes = 257;
  BOOST_CHECK_THROW(generated_dataset("train", options), Error);
}

/// The mean image of each class in one split classifies the other.
BOOST_AUTO_TEST_CASE(what_is_learnt_from_one_generated_split_holds_in_the_other) {
  const auto train = all(generated_dataset("train", {.samples = 3000}));
  const auto test = all(generated_dataset("test", {.samples = 300}));
  const std::size_t width = train.width;
  std::vector<float> means(10 * width);
  std::vector<float> counts(10);
  for (std::size_t i = 0; i < train.size(); ++i) ++counts[train.labels[i]];
  for (std::size_t i = 0; i < train.size(); ++i)
    for (std::size_t j = 0; j < width; ++j)
      means[train.labels[i] * width + j] += train.inputs[i * width + j] / counts[train.labels[i]];
  std::size_t right = 0;
  for (std::size_t i = 0; i < test.size(); ++i) {
    std::size_t nearest = 0;
    float best = 0;
    for (std::size_t c = 0; c < 10; ++c) {
      float distance = 0;
      for (std::size_t j = 0; j < width; ++j) {
        const float d = test.inputs[i * width + j] - means[c * width + j];
        distance += d * d;
      }
      if (c == 0 || distance < best) {
        best = distance;
        nearest = c;
      }
    }
    right += nearest == static_cast<std::size_t>(test.labels[i]);
  }
  BOOST_TEST(right > 270u);
  BOOST_TEST(right < 300u);  // nor is it too easy
}

BOOST_AUTO_TEST_SUITE_END()
