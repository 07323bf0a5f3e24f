// SPDX-License-Identifier: Apache-2.0
// The snippets of docs/data.md.
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "fashion_mnist.hpp"
#include "image_dataset.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/npy.hpp"
#include "lockstep/detail/data/pipeline.hpp"
#include "lockstep/detail/data/tokens.hpp"
#include "temporary_folder.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(data_example)

// clang-format off
struct Record {
  float inputs[100];
  std::int32_t label;
};

struct RecordFile {  // records, one behind the other
  using sample_type = LabelledSample<float, std::int32_t>;
  MappedFile file;

  std::size_t size() const { return file.size() / sizeof(Record); }
  void prepare(std::span<const std::size_t>) const { file.require_intact(); }  // once for a batch
  void read(std::size_t i, sample_type& out) const {
    const auto& record = reinterpret_cast<const Record*>(file.bytes().data())[i];
    out = {record.inputs, record.label};
  }
};
// clang-format on

BOOST_AUTO_TEST_CASE(the_documented_files_are_read) {
  const TemporaryFolder folder;
  const std::vector<float> pixels(2 * 28 * 28, 0.5f);
  const std::vector<std::int64_t> classes{3, 7};
  std::ofstream(folder / "train.bin") << std::string(4098, '\1');
  // clang-format off
write_npy(folder / "images.npy", pixels, {2, 28, 28});  // or numpy.save
write_npy(folder / "labels.npy", classes);
const auto images = npy_dataset<float, std::int32_t>(folder / "images.npy", folder / "labels.npy");
const TokenDataset<std::uint16_t> text(folder / "train.bin", 1024, {.vocabulary = 50257});
  // clang-format on
  BOOST_TEST(images.width() == 784u);
  BOOST_TEST(text.size() == 2u);

  const Record record{.inputs = {1, 2}, .label = 5};
  std::ofstream(folder / "records", std::ios::binary)
      .write(reinterpret_cast<const char*>(&record), sizeof record);
  // clang-format off
const auto records = RecordFile{MappedFile(folder / "records")} | stacked();
  // clang-format on
  LabelledBatch<float, std::int32_t> batch;
  records.load(std::vector<std::size_t>{0}, batch);
  BOOST_TEST((batch.labels[0] == 5 && batch.row(0)[1] == 2.f && batch.width == 100u));
}

BOOST_AUTO_TEST_CASE(the_documented_loop_runs_and_resumes) {
  std::size_t images = 0;
  // clang-format off
const auto train = fashion_mnist("train");  // or a type of your own: size(), batch_type, load()
DistributedSampler<> sampler(train.size(), WorldSize{4}, Rank{0});
DataLoader loader(train, sampler, {.batch_size = 64});
for (std::uint64_t epoch = 0; epoch < 2; ++epoch) {
  sampler.set_epoch(Epoch{epoch});
  for (const auto& batch : loader) images += batch.size();  // batch.row(i), batch.labels[i]
}
  // clang-format on
  BOOST_TEST(images == 2 * sampler.size());

  images = 0;
  SamplerState checkpoint;
  for (const auto& batch : loader) {
    images += batch.size();
    checkpoint = loader.state();
    if (images > 1000) break;
  }
  DistributedSampler<> later(train.size(), WorldSize{4}, Rank{0});
  DataLoader later_loader(train, later, {.batch_size = 64});
  // clang-format off
later_loader.resume(checkpoint);
for (std::uint64_t epoch = later.epoch().value(); epoch < 2; ++epoch) {
  later.set_epoch(Epoch{epoch});  // the resumed epoch: changes nothing
  for (const auto& batch : later_loader) images += batch.size();
}
  // clang-format on
  BOOST_TEST(images == later.size());
}

namespace {

// clang-format off
struct Sentences {  // files of yours, decoded when they are read
  using sample_type = OwnedSample<std::int32_t, float>;
  std::size_t size() const { return 1000; }
  void read(std::size_t index, sample_type& out) const {  // several threads call it
    out.inputs.assign(1 + index % 30, 7);  // the memory of the last sample is used again
    out.label = 1;
  }
};
// clang-format on

}  // namespace

BOOST_AUTO_TEST_CASE(the_documented_pipelines_run) {
  const ImageDataset train = generated_dataset("train", {.samples = 64});
  // clang-format off
const auto augmented = train | map([](auto& image, auto& random) {
  if (random.uniform() < 0.5)  // mirrored: every row of 28 pixels the other way round
    for (auto row = image.inputs.begin(); row != image.inputs.end(); row += 28)
      std::reverse(row, row + 28);
});
  // clang-format on
  DistributedSampler<> sampler(64, WorldSize{1}, Rank{0});
  DataLoader loader(augmented, sampler, {.batch_size = 64});
  std::size_t mirrored = 0;
  for (const auto& batch : loader) {
    LabelledBatch<float, std::int32_t> plain;
    std::vector<std::size_t> indices(64);
    for (std::size_t k = 0; k != 64; ++k) indices[k] = sampler[k];
    train.load(indices, plain);
    for (std::size_t i = 0; i != 64; ++i)
      mirrored += !std::equal(plain.row(i).begin(), plain.row(i).end(), batch.row(i).begin());
  }
  BOOST_TEST(mirrored > 16u);
  BOOST_TEST(mirrored < 48u);

  // clang-format off
const auto padded_sentences = Sentences{} | padded(0, 8);  // batch.row(i), lengths[i]
const auto joined_sentences = Sentences{} | ragged();      // batch.row(i), offsets
  // clang-format on
  PaddedBatch<std::int32_t, float> batch;
  padded_sentences.load(std::vector<std::size_t>{3, 11}, batch);
  BOOST_TEST(batch.width == 16u);
  BOOST_TEST(joined_sentences.size() == 1000u);
}

BOOST_AUTO_TEST_SUITE_END()
