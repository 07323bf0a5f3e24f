// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/torch/batch.hpp"

#include <ATen/Parallel.h>
#include <torch/types.h>

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/feed.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/pipeline.hpp"
#include "lockstep/detail/strategy/scatter.hpp"
#include "lockstep/detail/torch/collate.hpp"
#include "message_of.hpp"

BOOST_AUTO_TEST_SUITE(torch_batch)

using namespace lockstep;
using ranks::require;

namespace detail = lockstep::detail;  // LibTorch has one too

namespace {

/// A struct of tensors that says nothing about itself.
struct Images {
  at::Tensor inputs, labels;
};
/// One with more than tensors, which names its fields.
struct Sequences {
  at::Tensor tokens;
  at::Tensor mask;
  std::vector<int> lengths;
  float temperature = 0;

  std::size_t size() const { return lengths.size(); }
  friend void pack(auto& archive, Sequences& batch) {
    archive(batch.tokens, batch.mask, batch.lengths, batch.temperature);
  }
};
struct Nested {
  Images images;
  at::Tensor extra;
};
struct Nine {
  at::Tensor a, b, c, d, e, f, g, h, i;
};

static_assert(detail::tensor_field_count<Images>() == 2);
static_assert(detail::TensorStruct<Images> && detail::is_cut<Images>);
static_assert(detail::NamingFields<Sequences> && detail::is_cut<Sequences>);
static_assert(detail::tensor_field_count<Nested>() == 3 && detail::is_cut<Nested>);
static_assert(!detail::TensorStruct<Nine> && !detail::is_cut<Nine>);
static_assert(!detail::TensorStruct<std::vector<float>> && !detail::TensorStruct<int>);
static_assert(detail::is_cut<at::Tensor> && detail::is_cut<std::pair<at::Tensor, at::Tensor>>);
static_assert(!detail::WithFields<at::Tensor>);

template <class Batch>
auto share(const Batch& batch, std::size_t replicas, std::size_t i) {
  std::optional<detail::ShareOf<Batch>> out;
  detail::take_share(batch, {replicas, {}}, i, out);
  return *out;
}

bool are_equal(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  return a.scalar_type() == b.scalar_type() && at::equal(a, b);
}

Sequences sequences(std::size_t rows) {
  const auto n = static_cast<std::int64_t>(rows);
  return {torch::arange(n * 3).view({n, 3}), torch::rand({n, 2, 2}), std::vector<int>(rows, 7),
          0.5f};
}

using Rows = LabelledBatch<float, int>;
Rows rows(std::size_t count, std::size_t width) {
  Rows batch;
  batch.resize(count, width);
  for (std::size_t i = 0; i != batch.inputs.size(); ++i) batch.inputs[i] = static_cast<float>(i);
  for (std::size_t i = 0; i != count; ++i) batch.labels[i] = static_cast<int>(10 + i);
  return batch;
}

}  // namespace

BOOST_AUTO_TEST_CASE(memory_is_a_tensor_of_its_type_and_extents_without_a_copy) {
  std::vector<double> numbers{1, 2, 3, 4, 5, 6};
  const at::Tensor flat = as_tensor(numbers);
  BOOST_TEST(flat.scalar_type() == at::kDouble);
  BOOST_TEST(flat.sizes() == at::IntArrayRef({6}));
  const at::Tensor matrix = as_tensor(numbers, {2, 3});
  BOOST_TEST(matrix.data_ptr() == numbers.data());
  numbers[4] = 50;
  BOOST_TEST(matrix[1][1].item<double>() == 50);
  BOOST_TEST(as_tensor(std::span<const double>(numbers).first(2)).numel() == 2);

  const HostView<double, 3, dynamic> view(numbers.data(), 2);
  BOOST_TEST(as_tensor(view).sizes() == at::IntArrayRef({3, 2}));
  BOOST_TEST(as_tensor(view)[2][0].item<double>() == 50);
  // An mdspan whose first index is the near one.
  struct Columns {
    using element_type = double;
    static constexpr std::size_t rank() { return 2; }
    static std::size_t extent(std::size_t axis) { return axis == 0 ? 2 : 3; }
    static std::size_t stride(std::size_t axis) { return axis == 0 ? 1 : 2; }
    double* data_handle() const { return data; }
    double* data;
  };
  BOOST_TEST(as_tensor(Columns{numbers.data()})[0][2].item<double>() == 50);
  BOOST_TEST(as_tensor(Columns{numbers.data()})[1][1].item<double>() == 4);
  const HostView<double> scalar(numbers.data());
  BOOST_TEST(as_tensor(scalar).dim() == 0);

  const Half halves[2] = {Half(1.5f), Half(-2.f)};
  BOOST_TEST(as_tensor(halves).scalar_type() == at::kHalf);
  BOOST_TEST(as_tensor(halves)[1].item<float>() == -2.f);
  const std::vector<BFloat16> shorts(3);
  BOOST_TEST(as_tensor(shorts).scalar_type() == at::kBFloat16);
  const bool flags[] = {true, false};
  BOOST_TEST(as_tensor(flags).scalar_type() == at::kBool);
  const std::vector<std::uint8_t> none;
  BOOST_TEST(as_tensor(none).numel() == 0);
  BOOST_TEST(as_tensor(none, {0, 5}).size(1) == 5);

  BOOST_TEST(message_of([&] {
               as_tensor(numbers, {4, 2});
             }).find("room for 8 elements, and there are 6") != std::string::npos);
}

BOOST_AUTO_TEST_CASE(batches_of_lockstep_are_tensors_of_their_memory_with_wide_labels) {
  const Rows batch = rows(4, 3);
  const TensorBatch tensors = as_tensors(batch);
  BOOST_TEST(tensors.inputs.sizes() == at::IntArrayRef({4, 3}));
  BOOST_TEST(tensors.inputs.data_ptr() == batch.inputs.data());
  BOOST_TEST(tensors.labels.scalar_type() == at::kLong);
  BOOST_TEST(tensors.labels[3].item<std::int64_t>() == 13);
  BOOST_TEST(tensors.size() == 4u);
  const TensorBatch part = tensors.slice(1, 2);
  BOOST_TEST(part.inputs.data_ptr() == batch.inputs.data() + 3);
  BOOST_TEST(part.size() == 2u);
  BOOST_TEST(part.weights.size() == 2u);
  const TensorBatch weighted{tensors.inputs, {}, {1, 2, 3, 4}};
  BOOST_TEST(weighted.slice(1, 2).weights == (std::vector<float>{2, 3}));
  BOOST_TEST(!weighted.slice(1, 2).labels.defined());

  LabelledBatch<std::uint8_t, float> regression;
  regression.resize(2, 2);
  regression.labels = {0.5f, -1.f};
  BOOST_TEST(as_tensors(regression).labels.scalar_type() == at::kFloat);
  BOOST_TEST(as_tensors(regression).labels.data_ptr() == regression.labels.data());
  BOOST_TEST(as_tensors(regression).inputs.scalar_type() == at::kByte);
  LabelledBatch<float, std::uint64_t> wide;
  wide.resize(2, 1);
  BOOST_TEST(as_tensors(wide).labels.data_ptr() == wide.labels.data());
  BOOST_TEST(as_tensors(wide).labels.scalar_type() == at::kLong);

  PaddedBatch<int, int> padded;
  padded.resize(2, 5);
  padded.lengths = {5, 2};
  padded.weights = {1, 0};
  BOOST_TEST(as_tensors(padded).weights == padded.weights);
  BOOST_TEST(are_equal(as_tensors(padded).lengths, torch::tensor({5, 2}, at::kLong)));
  BOOST_TEST(are_equal(as_tensors(padded).slice(1, 1).lengths, torch::tensor({2}, at::kLong)));
}

BOOST_AUTO_TEST_CASE(replicas_get_rows_of_every_tensor_and_share_what_has_none) {
  const Images images{torch::arange(10).view({5, 2}), torch::arange(5)};
  BOOST_TEST(detail::row_count(images) == 5u);
  for (std::size_t i = 0; i != 2; ++i) {
    const Images part = share(images, 2, i);
    const std::vector<at::Tensor> chunks = images.inputs.chunk(2);
    BOOST_TEST(are_equal(part.inputs, chunks[i]));
    BOOST_TEST(are_equal(part.labels, images.labels.chunk(2)[i]));
    BOOST_TEST(part.inputs.storage().data() == images.inputs.storage().data());
  }
  const auto [inputs, labels] = share(std::pair(images.inputs, images.labels), 5, 4);
  BOOST_TEST(are_equal(inputs, torch::tensor({{8, 9}}, at::kLong)));
  BOOST_TEST(are_equal(share(images.inputs, 2, 1), images.inputs.chunk(2)[1]));
  BOOST_TEST(!share(Images{images.inputs, {}}, 2, 1).labels.defined());

  Sequences batch = sequences(4);
  batch.mask = torch::tensor(3.f);  // without extents, so all have it
  const Sequences part = share(batch, 2, 1);
  BOOST_TEST(are_equal(part.tokens, batch.tokens.slice(0, 2, 4)));
  BOOST_TEST(are_equal(part.mask, batch.mask));
  BOOST_TEST(part.lengths.size() == 2u);
  BOOST_TEST(part.temperature == 0.5f);
  BOOST_TEST(detail::samples_of(batch, {2, {}}, 0) == 2u);
}

BOOST_AUTO_TEST_CASE(tensors_that_are_fed_arrive_equal_whatever_their_type_and_strides) {
  for (const std::size_t world : {1, 2, 4}) {
    const auto ends = ranks::run(ranks::As::processes, world, [&](auto& comm) {
      at::set_num_threads(1);
      const std::vector<at::Tensor> all{
          torch::arange(24, at::kFloat).view({2, 3, 4}).permute({2, 0, 1}),
          torch::arange(6).to(at::kBFloat16),
          torch::arange(48, at::kDouble)
              .view({1, 4, 3, 4})
              .contiguous(at::MemoryFormat::ChannelsLast),
          torch::tensor(7, at::kLong),
          torch::zeros({0, 5}, at::kHalf),
          torch::tensor({true, false, true}),
          at::Tensor()};
      Images images;
      Sequences texts;
      TensorBatch usual;
      for (std::size_t turn = 0; turn != all.size(); ++turn) {
        const Rank root{turn % world};
        const Images expected{all[turn], all[(turn + 1) % all.size()]};
        if (comm.rank() == root) images = expected;
        broadcast_batch(comm, images, root);
        require(are_equal(images.inputs, expected.inputs), "inputs differ");
        require(are_equal(images.labels, expected.labels), "labels differ");
        if (comm.rank() == root) texts = {all[turn], all[turn], std::vector<int>(turn), 2.f};
        broadcast_batch(comm, texts, root);
        require(
            are_equal(texts.mask, all[turn]) && texts.size() == turn && texts.temperature == 2.f,
            "a packed struct differs");
        if (comm.rank() == root) usual = {all[turn], all[turn], {1.f, 0.f}};
        broadcast_batch(comm, usual, root);
        require(are_equal(usual.labels, all[turn]) && usual.weights.at(1) == 0, "a batch differs");
      }
    });
    for (const std::string& end : ends) BOOST_TEST(end == "");
  }
}

BOOST_AUTO_TEST_CASE(memory_that_somebody_has_kept_is_not_overwritten) {
  detail::ArchiveWriter writer;
  writer.put(Images{torch::ones({3}), torch::ones({3})});
  const auto read = [&](Images& to) { detail::ArchiveReader(writer.written()).take(to); };
  Images mine;
  read(mine);
  const void* const memory = mine.inputs.data_ptr();
  mine.inputs.fill_(5);
  read(mine);
  BOOST_TEST(mine.inputs.data_ptr() == memory);  // used again
  BOOST_TEST(mine.inputs.sum().item<float>() == 3);
  const at::Tensor kept = mine.inputs.detach();  // another tensor of the same memory
  const at::Tensor graph = mine.labels;
  mine.inputs.fill_(5);
  read(mine);
  BOOST_TEST(kept.sum().item<float>() == 15);
  BOOST_TEST(mine.inputs.data_ptr() != memory);
  BOOST_TEST(mine.labels.data_ptr() != graph.data_ptr());
  // A tensor whose elements do not lie in rows, or that autograd follows, is not written either.
  writer.clear();
  writer.put(Images{torch::ones({2, 3}), torch::ones({3})});
  mine.inputs = torch::empty_strided({2, 3}, {1, 2});
  mine.labels = torch::zeros({3}).requires_grad_();
  detail::ArchiveReader(writer.written()).take(mine);
  BOOST_TEST(mine.inputs.is_contiguous());
  BOOST_TEST(mine.inputs.sum().item<float>() == 6);
  BOOST_TEST(!mine.labels.requires_grad());
}

BOOST_AUTO_TEST_CASE(an_archive_of_another_type_is_rejected) {
  detail::ArchiveWriter writer;
  writer.put(Images{torch::ones({3}), torch::ones({3})});
  std::vector<std::uint8_t> bytes(writer.written().begin(), writer.written().end());
  const auto words = [&] {
    Images out;
    return message_of([&] { detail::ArchiveReader(bytes).take(out); });
  };
  BOOST_TEST(words() == "nothing was thrown");
  for (std::size_t i = 0; i != bytes.size(); ++i) {
    const std::uint8_t before = bytes[i];
    bytes[i] = 0xff;
    // A value may differ; nothing is read or allocated beyond the archive.
    const std::string said = words();
    BOOST_TEST((said == "nothing was thrown" || said.find("lockstep: feed: ") == 0), said);
    bytes[i] = before;
  }
  detail::ArchiveWriter empty;
  empty.put(Images{torch::ones({0, 1}), torch::ones({3})});
  std::vector<std::uint8_t> negative(empty.written().begin(), empty.written().end());
  for (std::size_t i = 0; i != 8; ++i) negative[1 + 8 + 8 + i] = 0xff;  // the second extent
  Images out;
  BOOST_TEST(message_of([&] {
               detail::ArchiveReader(negative).take(out);
             }).find("lockstep: feed: ") == 0u);
  bytes[1 + 8] = 0x7f;  // the first extent
  BOOST_TEST(words().find("feed: an archive does not hold a tensor") != std::string::npos);
  bytes.resize(20);
  BOOST_TEST(words().find("feed") != std::string::npos);
}

BOOST_AUTO_TEST_CASE(samples_become_batches_of_tensors_for_loaders) {
  std::vector<float> inputs(7 * 4);
  for (std::size_t i = 0; i != inputs.size(); ++i) inputs[i] = static_cast<float>(i);
  const InMemoryDataset<float, std::int32_t> data(inputs, {0, 1, 2, 3, 4, 5, 6});
  const auto doubled = map([](const auto& sample) {
    OwnedSample<float, std::int32_t> out{{sample.inputs.begin(), sample.inputs.end()},
                                         sample.label};
    for (float& x : out.inputs) x *= 2;
    return out;
  });
  const auto batches = data | doubled | tensors({1, 2, 2});
  static_assert(std::is_same_v<decltype(batches)::batch_type, TensorBatch>);
  DistributedSampler<Padding, InOrder> sampler(7, WorldSize{1}, Rank{0});
  for (const std::size_t workers : {0, 2}) {
    DataLoader loader(batches, sampler, {.batch_size = 3, .workers = workers});
    std::vector<at::Tensor> kept;
    std::int64_t first = 0;
    for (const TensorBatch& batch : loader) {
      const std::int64_t n = std::min<std::int64_t>(3, 7 - first);
      BOOST_TEST(batch.inputs.sizes() == at::IntArrayRef({n, 1, 2, 2}));
      BOOST_TEST(batch.labels.scalar_type() == at::kLong);
      BOOST_TEST(are_equal(batch.labels, torch::arange(first, first + n)));
      BOOST_TEST(are_equal(batch.inputs.flatten(),
                           2 * torch::arange(4 * first, 4 * (first + n), at::kFloat)));
      BOOST_TEST(batch.weights == std::vector<float>(batch.size(), 1));
      kept.push_back(batch.labels);
      first += n;
    }
    BOOST_TEST(are_equal(at::cat(kept), torch::arange(7)));  // kept tensors stay
  }
  TensorBatch batch;
  const std::size_t some[] = {4, 1};
  batches.load(some, batch);
  const void* const memory = batch.inputs.data_ptr();
  batches.load(some, batch);
  BOOST_TEST(batch.inputs.data_ptr() == memory);
  batches.load({}, batch);
  BOOST_TEST(batch.size() == 0u);
  const auto wrong = data | tensors({3, 2});
  BOOST_TEST(message_of([&] { wrong.load(some, batch); }).find("inputs of [4] and the first") !=
             std::string::npos);
}

BOOST_AUTO_TEST_CASE(tensors_as_samples_have_one_size_and_their_labels_become_wide) {
  struct Sample {
    at::Tensor inputs, label;
  };
  const auto put = [](const at::Tensor& second, std::vector<std::int64_t> shape) {
    const detail::TensorCollate collate{{}, std::move(shape)};
    TensorBatch batch;
    collate.put(Sample{torch::zeros({2, 3}), torch::tensor(7, at::kInt)}, 0, 2, batch);
    collate.put(Sample{second, torch::tensor(8, at::kInt)}, 1, 2, batch);
    return batch;
  };
  const TensorBatch batch = put(torch::ones({2, 3}), {3, 2});
  BOOST_TEST(batch.inputs.sizes() == at::IntArrayRef({2, 3, 2}));
  BOOST_TEST(batch.inputs.sum().item<float>() == 6);
  BOOST_TEST(are_equal(batch.labels, torch::tensor({7, 8}, at::kLong)));
  const auto words = [&](const at::Tensor& second, std::vector<std::int64_t> shape) {
    return message_of([&] { put(second, std::move(shape)); });
  };
  BOOST_TEST(words(torch::ones({3, 2}), {})
                 .find("inputs of [3, 2] and the first sample of its batch has [2, 3]") !=
             std::string::npos);
  BOOST_TEST(words(torch::ones({2, 4}), {6}).find("inputs of [2, 4] and the first") !=
             std::string::npos);
}

BOOST_AUTO_TEST_SUITE_END()
