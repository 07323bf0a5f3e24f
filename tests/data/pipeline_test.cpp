// SPDX-License-Identifier: Apache-2.0
// Samples, their transforms and how they become batches. What workers do with them is in
// loader_test.cpp.
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <exception>
#include <numeric>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "image_dataset.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/pipeline.hpp"
#include "message_of.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(data_pipeline)

namespace {

using Numbers = InMemoryDataset<float, int>;
using Sample = OwnedSample<float, int>;

/// Sample i is the row {2i, 2i + 1} with label i.
Numbers numbers(std::size_t n) {
  std::vector<float> inputs(2 * n);
  std::vector<int> labels(n);
  std::iota(inputs.begin(), inputs.end(), 0.f);
  std::iota(labels.begin(), labels.end(), 0);
  return {std::move(inputs), std::move(labels)};
}

/// Sample i has i values i, and label i.
struct Triangle {
  using sample_type = Sample;
  std::size_t samples;
  std::size_t size() const { return samples; }
  void read(std::size_t index, Sample& out) const {
    out.inputs.assign(index, static_cast<float>(index));
    out.label = static_cast<int>(index);
  }
};
static_assert(SampleSource<Triangle> && !Dataset<Triangle>);

template <class Data>
auto batch_of(const Data& data, const std::vector<std::size_t>& indices, Pass pass = {}) {
  typename Data::batch_type batch;
  data.load(indices, pass, batch);
  return batch;
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_function_returns_the_new_sample_or_changes_the_one_it_has_or_fills_another) {
  const Numbers source = numbers(5);
  const auto returned = source | map([](const auto& sample) {
                          return Sample{{sample.inputs[1], sample.inputs[0], 7}, -sample.label};
                        });
  const auto filled = source | map<Sample>([](const auto& sample, Sample& out) {
                        out.inputs.assign(sample.inputs.rbegin(), sample.inputs.rend());
                        out.inputs.push_back(7);
                        out.label = -sample.label;
                      });
  // The source's own rows are views, of which a shorter one is taken and made longer again.
  const auto changed = source | map([](auto& sample) {
                         sample.inputs = sample.inputs.first(1);
                         sample.label = -sample.label;
                       }) |
                       map([](const auto& sample) {
                         return Sample{{sample.inputs[0] + 1, sample.inputs[0], 7}, sample.label};
                       });
  static_assert(Dataset<decltype(returned)> && SampleSource<decltype(returned)>);
  static_assert(std::is_same_v<decltype(returned)::batch_type, LabelledBatch<float, int>>);
  const auto expect = [](const auto& batch) {
    BOOST_TEST(batch.width == 3u);
    BOOST_TEST(batch.inputs == (std::vector<float>{9, 8, 7, 3, 2, 7}));
    BOOST_TEST(batch.labels == (std::vector<int>{-4, -1}));
    BOOST_TEST(batch.weights == (std::vector<float>{1, 1}));
  };
  BOOST_TEST(returned.size() == 5u);
  expect(batch_of(returned, {4, 1}));
  expect(batch_of(filled, {4, 1}));
  expect(batch_of(changed, {4, 1}));
  Sample one;
  changed.read(4, one);
  BOOST_TEST(one.inputs == (std::vector<float>{9, 8, 7}));
}

BOOST_AUTO_TEST_CASE(a_map_that_changes_nothing_gives_the_batches_of_its_source) {
  const ImageDataset images = generated_dataset(
      "train", {.samples = 20, .width = 30, .normalization = {.mean = 0.3f, .deviation = 0.2f}});
  const auto same = images | map([](auto&) {});
  const std::vector<std::size_t> indices{3, 19, 0, 3};
  ImageDataset::batch_type expected;
  images.load(indices, expected);
  const auto batch = batch_of(same, indices);
  BOOST_TEST(batch.inputs == expected.inputs);
  BOOST_TEST(batch.labels == expected.labels);
  BOOST_TEST(batch.width == 30u);
  BOOST_TEST(batch_of(same, {}).size() == 0u);
}

BOOST_AUTO_TEST_CASE(a_pipeline_holds_temporaries_and_refers_to_what_the_program_holds) {
  Numbers source = numbers(3);
  const auto add =
      map([](const auto& sample) { return Sample{{sample.inputs[0] + 1}, sample.label}; });
  const auto refers = source | add;
  const auto holds = numbers(3) | add | stacked();
  source = numbers(7);
  BOOST_TEST(refers.size() == 7u);
  BOOST_TEST(holds.size() == 3u);
  const auto moved = [](auto data) { return data; }(numbers(4) | add);
  BOOST_TEST(batch_of(moved, {3}).inputs == (std::vector<float>{7}));
}

BOOST_AUTO_TEST_CASE(random_numbers_follow_from_seed_epoch_sample_and_place_alone) {
  const Numbers source = numbers(40);
  const auto draw = map([](const auto& sample, auto& random) {
    std::vector<float> inputs(sample.inputs.begin(), sample.inputs.end());
    inputs.push_back(random.template uniform<float>());
    return Sample{std::move(inputs), sample.label};
  });
  const auto pipeline = source | draw;
  const Pass pass{Seed{3}, Epoch{5}};
  const auto batch = batch_of(pipeline, {7, 30, 7}, pass);
  RandomStream of_7(detail::sample_seed(pass, 7, 0));
  BOOST_TEST(batch.row(0)[2] == of_7.uniform<float>());
  BOOST_TEST(batch.row(2)[2] == batch.row(0)[2]);  // a duplicate is the same sample
  BOOST_TEST(batch_of(pipeline, {30}, pass).row(0)[2] == batch.row(1)[2]);

  // Every seed, epoch, sample and index has numbers of its own.
  const auto twice = source | map([](auto&) {}) | draw | draw;
  std::set<float> seen;
  std::size_t drawn = 0;
  for (const std::uint64_t seed : {0u, 1u, 2u}) {
    for (const std::uint64_t epoch : {0u, 1u, 2u}) {
      for (const std::size_t sample : {0u, 1u, 2u}) {
        const Pass at{Seed{seed}, Epoch{epoch}};
        const auto row = batch_of(twice, {sample}, at);
        seen.insert({row.inputs[2], row.inputs[3]});
        drawn += 2;
        // A function that does not draw changes nothing.
        BOOST_TEST(row.inputs[2] == batch_of(pipeline, {sample}, at).inputs[2]);
      }
    }
  }
  BOOST_TEST(seen.size() == drawn);

  // They are spread evenly: the mean of 40 is at most 5 deviations off.
  std::vector<std::size_t> all(40);
  std::iota(all.begin(), all.end(), 0);
  const auto whole = batch_of(pipeline, all, pass);
  float sum = 0;
  for (std::size_t i = 0; i != 40; ++i) sum += whole.row(i)[2];
  BOOST_TEST(std::abs(sum / 40 - 0.5f) < 5 * 0.289f / std::sqrt(40.f));
}

BOOST_AUTO_TEST_CASE(samples_of_different_length_are_filled_up_or_come_one_behind_the_other) {
  const Triangle source{6};
  const auto padded_rows = source | padded(-1);
  const auto batch = batch_of(padded_rows, {2, 0, 3});
  BOOST_TEST(batch.width == 3u);
  BOOST_TEST(batch.inputs == (std::vector<float>{2, 2, -1, -1, -1, -1, 3, 3, 3}));
  BOOST_TEST(batch.lengths == (std::vector<std::size_t>{2, 0, 3}));
  BOOST_TEST(batch.labels == (std::vector<int>{2, 0, 3}));
  BOOST_TEST(batch.weights == (std::vector<float>{1, 1, 1}));
  BOOST_TEST(batch.sample(0).size() == 2u);
  PaddedBatch<float, int> part;
  batch.slice(1, 2, part);
  BOOST_TEST(part.inputs == (std::vector<float>{-1, -1, -1, 3, 3, 3}));
  BOOST_TEST(part.lengths == (std::vector<std::size_t>{0, 3}));

  BOOST_TEST(batch_of(source | padded(0, 4), {5, 1}).width == 8u);
  BOOST_TEST(batch_of(source | padded(0, 4), {0}).width == 0u);
  BOOST_CHECK_THROW(padded(0, 0), Error);

  const auto behind = batch_of(source | ragged(), {2, 0, 3});
  BOOST_TEST(behind.inputs == (std::vector<float>{2, 2, 3, 3, 3}));
  BOOST_TEST(behind.offsets == (std::vector<std::size_t>{0, 2, 2, 5}));
  BOOST_TEST(behind.labels == (std::vector<int>{2, 0, 3}));
  BOOST_TEST(behind.row(2).size() == 3u);
  RaggedBatch<float, int> cut;
  behind.slice(1, 2, cut);
  BOOST_TEST(cut.inputs == (std::vector<float>{3, 3, 3}));
  BOOST_TEST(cut.offsets == (std::vector<std::size_t>{0, 0, 3}));
  BOOST_TEST(batch_of(source | ragged(), {}).offsets == (std::vector<std::size_t>{0}));
}

/// Samples point into what `map` was given until their batch is made: every one of the batch.
BOOST_AUTO_TEST_CASE(a_sample_may_point_into_the_one_before_it) {
  const auto halves =
      Triangle{9} | map([](auto& sample) {
        const std::span<const float> inputs(sample.inputs);
        return LabelledSample<float, int>{inputs.first(inputs.size() / 2), sample.label};
      });
  const auto batch = batch_of(halves | ragged(), {8, 2, 6});
  BOOST_TEST(batch.inputs == (std::vector<float>{8, 8, 8, 8, 2, 6, 6, 6}));
  BOOST_TEST(batch_of(halves, {4, 5}).inputs == (std::vector<float>{4, 4, 5, 5}));
}

BOOST_AUTO_TEST_CASE(a_function_of_the_program_makes_any_batch) {
  struct Names {
    std::vector<std::string> names;
  };
  const auto named =
      Triangle{20} | map([](const auto& sample) { return std::to_string(sample.label); });
  const auto returned = named | collate([](std::span<const std::string> samples) {
                          return Names{{samples.begin(), samples.end()}};
                        });
  const auto filled = named | collate<Names>([](auto samples, Names& out) {
                        out.names.assign(samples.begin(), samples.end());
                      });
  BOOST_TEST(batch_of(returned, {4, 11}).names == (std::vector<std::string>{"4", "11"}));
  BOOST_TEST(batch_of(filled, {4, 11}).names == (std::vector<std::string>{"4", "11"}));
}

BOOST_AUTO_TEST_CASE(memory_is_used_again) {
  const auto data = Triangle{9} | map<Sample>([](const Sample& sample, Sample& out) {
                      out.inputs.assign(sample.inputs.begin(), sample.inputs.end());
                      out.label = sample.label;
                    }) |
                    padded(0);
  decltype(data)::batch_type batch;
  data.load(std::vector<std::size_t>{8, 8}, batch);
  const float* const memory = batch.inputs.data();
  data.load(std::vector<std::size_t>{3, 7}, batch);
  BOOST_TEST(batch.inputs.data() == memory);

  std::vector<const float*> seen;
  const auto watched =
      Triangle{9} | map([&](auto& sample) { seen.push_back(sample.inputs.data()); });
  LabelledBatch<float, int> rows_of;
  for (int i = 0; i != 2; ++i) watched.load(std::vector<std::size_t>{8, 8}, rows_of);
  BOOST_TEST(seen == std::vector<const float*>(4, seen[0]));
}

/// A batch of another library, whose memory a data set writes directly.
BOOST_AUTO_TEST_CASE(rows_are_written_into_any_batch_that_has_some) {
  struct Foreign {
    double memory[8] = {};
    std::size_t width = 0;
    short labels[2] = {};
    float weights[2] = {};
    void resize(std::size_t rows, std::size_t columns) {
      width = columns;
      for (std::size_t i = 0; i != rows; ++i) weights[i] = 1;
    }
    std::span<double> row(std::size_t i) { return {memory + i * width, width}; }
  };
  static_assert(LabelledRows<Foreign>);
  const auto expect = [](const auto& data) {
    Foreign batch;
    data.load(std::vector<std::size_t>{2, 1}, batch);
    BOOST_TEST(batch.memory[0] == 4.0);
    BOOST_TEST(batch.memory[3] == 3.0);
    BOOST_TEST(batch.labels[0] == 2);
    BOOST_TEST(batch.weights[1] == 1.f);
  };
  const Numbers source = numbers(3);
  expect(source);
  expect(source | map([](auto&) {}));
  using Bytes = std::vector<std::uint8_t>;
  const ImageDataset images(Bytes{0, 255, 0, 0}, Bytes{1, 2}, 3);
  Foreign batch;
  images.load(std::vector<std::size_t>{0}, batch);
  BOOST_TEST(batch.memory[1] == 1.0);
}

BOOST_AUTO_TEST_CASE(what_fails_names_its_sample) {
  const auto throwing = Triangle{9} | map([](const Sample& sample) {
                          if (sample.label == 5) throw std::out_of_range("no pixels");
                          if (sample.label == 6) throw Error("decode", "no JPEG", "say PNG");
                          if (sample.label == 7) throw 7;
                          if (sample.label == 8) throw Stopped(0, "");
                          return Sample{{1.f}, sample.label};
                        });
  const auto load = [&](std::vector<std::size_t> indices) {
    return message_of([&] { batch_of(throwing, indices); });
  };
  BOOST_TEST(load({1, 5}) ==
             "lockstep: load: sample 5: no pixels; look at this sample, and at the functions that "
             "read and change it");
  BOOST_TEST(load({6}) == "lockstep: load: sample 6: decode: no JPEG; say PNG");
  BOOST_TEST(load({7}).find("sample 7: an exception that is no std::exception;") !=
             std::string::npos);
  BOOST_CHECK_THROW(batch_of(throwing, {8}), Stopped);
  BOOST_TEST(message_of([] { batch_of(Triangle{9} | stacked(), {4, 4, 3}); }) ==
             "lockstep: load: sample 3: stacked: it has 3 inputs and the first sample of its batch "
             "has 4; give all samples one width with map, or say | padded(fill) or | ragged()");
}

BOOST_AUTO_TEST_CASE(a_loader_says_which_draw_of_which_batch_a_sample_was) {
  const auto throwing = Triangle{20} | map([](const Sample& sample) {
                          if (sample.label == 13) throw std::out_of_range("no pixels");
                          return Sample{{1.f}, sample.label};
                        });
  DistributedSampler<Padding, InOrder> sampler(20, WorldSize{1}, Rank{0});
  sampler.set_epoch(Epoch{4});
  DataLoader loader(throwing, sampler, {.batch_size = 5});
  try {
    for ([[maybe_unused]] const auto& batch : loader) {
    }
    BOOST_ERROR("nothing was thrown");
  } catch (const Error& error) {
    BOOST_TEST(error.operation() == "DataLoader");
    BOOST_TEST(error.problem() == "sample 13 (draw 3 of batch 2 of epoch 4): no pixels");
    BOOST_CHECK_THROW(std::rethrow_if_nested(error), std::out_of_range);
  }
}

BOOST_AUTO_TEST_CASE(of_a_data_set_that_fails_as_a_whole_all_samples_are_named) {
  struct Broken {
    using batch_type = LabelledBatch<float, int>;
    static std::size_t size() { return 100; }
    void load(std::span<const std::size_t>, batch_type&) const {
      throw std::runtime_error("the disk is gone");
    }
  };
  const Broken broken;
  DistributedSampler<Padding, InOrder> sampler(100, WorldSize{1}, Rank{0});
  const auto problem = [&](std::size_t batch_size) {
    DataLoader loader(broken, sampler, {.batch_size = batch_size, .workers = 0});
    return message_of([&] { loader.begin(); });
  };
  BOOST_TEST(
      problem(3) ==
      "lockstep: DataLoader: samples 0, 1, 2 (batch 0 of epoch 0): the disk is gone; look at "
      "these samples, and at what loads them");
  BOOST_TEST(problem(64).find("samples 0, 1, 2, ... 63 (batch 0 of epoch 0): the disk") !=
             std::string::npos);

  // What a data set loads from another one has other numbers.
  struct Reversed {
    using batch_type = LabelledBatch<float, int>;
    static std::size_t size() { return 100; }
    void load(std::span<const std::size_t> indices, batch_type& out) const {
      batch_of(Triangle{9} | stacked(), {2, 3});
      out.resize(indices.size(), 0);
    }
  };
  const Reversed reversed;
  DataLoader loader(reversed, sampler, {.batch_size = 2, .workers = 0});
  BOOST_TEST(message_of([&] {
               loader.begin();
             }).find("samples 0, 1 (batch 0 of epoch 0): load: sample 3: stacked: it has 3") !=
             std::string::npos);
}

BOOST_AUTO_TEST_SUITE_END()
