// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/torch/data.hpp"

#include <ATen/ATen.h>
#include <torch/data.h>
#include <torch/nn/modules/linear.h>

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/detail/data/feed.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/pipeline.hpp"
#include "lockstep/detail/torch/model.hpp"
#include "lockstep/detail/trainer/trainer.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "message_of.hpp"
#include "state_dict_net.hpp"
#include "temporary_folder.hpp"

BOOST_AUTO_TEST_SUITE(torch_data)

using namespace lockstep;
using ::torch::data::Example;

namespace detail = lockstep::detail;  // LibTorch has one too

namespace {

/// Samples whose numbers follow from their place.
struct Numbers : ::torch::data::Dataset<Numbers> {
  explicit Numbers(std::size_t count = 10) : samples(count) {}
  Example<> get(std::size_t index) override {
    ++calls;  // it is not const, and LibTorch's are not either
    const auto i = static_cast<double>(index);
    return {at::full({2, 3}, i), at::full({}, static_cast<std::int64_t>(index % 4), at::kLong)};
  }
  std::optional<std::size_t> size() const override { return samples; }
  std::size_t samples;
  std::size_t calls = 0;
};

struct Unsized : ::torch::data::Dataset<Unsized> {
  Example<> get(std::size_t) override { return {}; }
  std::optional<std::size_t> size() const override { return std::nullopt; }
};

/// One that must not be used by two threads at a time; a copy may.
struct Alone : ::torch::data::Dataset<Alone> {
  Alone() = default;
  Alone(const Alone&) : Alone() {}
  Example<> get(std::size_t) override {
    if (is_busy.exchange(true)) throw std::runtime_error("two threads use one data set");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    is_busy = false;
    return {at::zeros({1}), at::zeros({})};
  }
  std::optional<std::size_t> size() const override { return 32; }
  std::atomic<bool> is_busy = false;
};

using Stack = ::torch::data::transforms::Stack<>;

struct Lines : TorchModel<Lines, ::torch::nn::Linear> {
  Lines() : TorchModel(std::make_shared<::torch::nn::LinearImpl>(6, 4)) {
    const at::NoGradGuard quiet;
    module()->weight.copy_(at::arange(24, at::kFloat).view({4, 6}).sin());
    module()->bias.zero_();
  }
  Lines(const Lines&) = default;
  at::Tensor loss(const Example<>& batch) { return loss(batch.data, batch.target); }
  at::Tensor loss(const TensorBatch& batch) { return loss(batch.inputs, batch.labels); }
  at::Tensor loss(const at::Tensor& inputs, const at::Tensor& labels) {
    return at::cross_entropy_loss(module()->forward(inputs.flatten(1).div(10)), labels);
  }
};

std::vector<std::size_t> drawn(auto& sampler) {
  std::vector<std::size_t> all;
  sampler.reset();
  while (auto some = sampler.next(3)) all.insert(all.end(), some->begin(), some->end());
  return all;
}

std::vector<std::size_t> labels_seen(auto& loader) {
  std::vector<std::size_t> seen;
  for (auto& batch : loader)
    for (std::int64_t i = 0; i != batch.data.size(0); ++i)
      seen.push_back(static_cast<std::size_t>(batch.data[i][0][0].template item<float>()));
  return seen;
}

}  // namespace

BOOST_AUTO_TEST_CASE(ranks_draw_what_pythons_sampler_draws_in_every_epoch) {
  if (state_dicts::peer().empty()) return;
  const TemporaryFolder folder;
  BOOST_REQUIRE(state_dicts::ask_peer("order 11 3 5 4 " + folder / "order", folder / "peer"));
  std::ifstream file(folder / "order");
  std::vector<RankSampler<>> samplers;
  for (std::size_t rank = 0; rank != 3; ++rank)
    samplers.emplace_back(11, WorldSize{3}, Rank{rank}, SamplerOptions{.seed = Seed{5}});
  for (std::size_t epoch = 0; epoch != 4; ++epoch) {
    for (RankSampler<>& sampler : samplers) {
      std::string line;
      std::getline(file, line);
      std::istringstream words(line);
      const std::vector<std::size_t> theirs(std::istream_iterator<std::size_t>(words), {});
      sampler.set_epoch(epoch);
      const std::vector<std::size_t> ours = drawn(sampler);
      BOOST_TEST(ours == theirs, boost::test_tools::per_element());
      BOOST_TEST(drawn(sampler) == ours, boost::test_tools::per_element());  // until set_epoch
    }
  }
}

BOOST_AUTO_TEST_CASE(set_epoch_reaches_the_copy_that_a_loader_has) {
  RankSampler<> sampler(10, WorldSize{2}, Rank{1});
  for (const std::size_t workers : {0, 2}) {
    auto loader = ::torch::data::make_data_loader(
        Numbers().map(Stack()), sampler, ::torch::data::DataLoaderOptions(2).workers(workers));
    std::set<std::vector<std::size_t>> orders;
    for (std::size_t epoch = 0; epoch != 4; ++epoch) {
      sampler.set_epoch(epoch);
      DistributedSampler<> expected(10, WorldSize{2}, Rank{1});
      expected.set_epoch(Epoch{epoch});
      std::vector<std::size_t> order;
      for (const std::size_t i : expected) order.push_back(i);
      const std::vector<std::size_t> seen = labels_seen(*loader);
      BOOST_TEST(seen == order, boost::test_tools::per_element());
      orders.insert(seen);
    }
    BOOST_TEST(orders.size() == 4u);
  }
}

BOOST_AUTO_TEST_CASE(a_sampler_goes_on_from_an_archive) {
  const TemporaryFolder folder;
  const SamplerOptions options{.seed = Seed{5}};
  RankSampler<> sampler(10, WorldSize{2}, Rank{0}, options);
  sampler.set_epoch(3);
  std::vector<std::size_t> all = drawn(sampler);
  sampler.reset();
  sampler.next(2);
  {
    ::torch::serialize::OutputArchive archive;
    sampler.save(archive);
    archive.save_to(folder / "sampler");
  }
  RankSampler<> other(10, WorldSize{2}, Rank{0}, options);
  ::torch::serialize::InputArchive archive;
  archive.load_from(folder / "sampler");
  other.load(archive);
  BOOST_TEST(other.epoch().value() == 3u);
  const std::vector<std::size_t> rest = drawn(other);
  BOOST_TEST(rest == std::vector(all.begin() + 2, all.end()), boost::test_tools::per_element());
  BOOST_TEST(drawn(other) == all, boost::test_tools::per_element());  // the epoch again
  // Of another size it is the sampler that it would have been.
  RankSampler<> small(6, WorldSize{2}, Rank{0}, options);
  small.set_epoch(3);
  other.reset(6);
  BOOST_TEST(other.size() == 3u);
  BOOST_TEST(drawn(other) == drawn(small), boost::test_tools::per_element());
  {
    ::torch::serialize::OutputArchive strange;
    strange.write("lockstep.sampler", at::zeros({3}, at::kLong), true);
    strange.save_to(folder / "strange");
  }
  ::torch::serialize::InputArchive strange;
  strange.load_from(folder / "strange");
  BOOST_TEST(message_of([&] { other.load(strange); }).find("the state of another sampler") !=
             std::string::npos);
  RankSampler<> larger(11, WorldSize{2}, Rank{0}, options);
  BOOST_TEST(message_of([&] {
               larger.load(archive);
             }).find("sample count 10, this sampler has 11") != std::string::npos);
}

BOOST_AUTO_TEST_CASE(examples_are_cut_counted_and_fed) {
  const Example<> example{at::arange(10).view({5, 2}), at::arange(5)};
  static_assert(detail::is_cut<Example<>>);
  BOOST_TEST(detail::row_count(example) == 5u);
  std::optional<Example<>> part;
  detail::take_share(example, {2, {}}, 1, part);
  BOOST_TEST(at::equal(part->data, example.data.chunk(2)[1]));
  BOOST_TEST(at::equal(part->target, example.target.chunk(2)[1]));
  BOOST_TEST(detail::row_count(Example<>(example.data, at::zeros({}))) == 5u);
  const ::torch::data::TensorExample alone(at::arange(4));
  std::optional<::torch::data::TensorExample> half;
  detail::take_share(alone, {2, {}}, 0, half);
  BOOST_TEST(half->data.numel() == 2);
  const auto ends = ranks::run(ranks::As::processes, 2, [&](auto& comm) {
    Example<> fed;
    if (comm.rank() == Rank{1}) fed = example;
    broadcast_batch(comm, fed, Rank{1});
    ranks::require(at::equal(fed.data, example.data) && at::equal(fed.target, example.target),
                   "another example");
  });
  for (const std::string& end : ends) BOOST_TEST(end == "");
}

BOOST_AUTO_TEST_CASE(batches_of_libtorchs_loaders_train_under_ddp_and_dp_alike) {
  // Three ways over the same samples: a LibTorch loader on 2 ranks, lockstep's loader on 2 ranks,
  // and DP of 2 replicas in one process; the batches of an update are the same samples.
  const auto weights = [](auto& wrapped) {
    const auto* const data = wrapped.model().module()->weight.template const_data_ptr<float>();
    return std::vector<float>(data, data + 24);
  };
  ranks::Common<float[3][24]> results;
  const auto note = [&](std::size_t way, const std::vector<float>& all) {
    std::copy(all.begin(), all.end(), (*results)[way]);
  };
  const auto ends = ranks::run(ranks::As::processes, 2, [&](auto& comm) {
    at::set_num_threads(1);
    RankSampler<Padding, InOrder> sampler(8, comm);
    auto loader = ::torch::data::make_data_loader(Numbers(8).map(Stack()), sampler, 2);
    DistributedDataParallel<Lines> ddp(comm);
    for (auto& batch : *loader) ddp.step(batch);
    Tally tally;
    for (auto& batch : *loader) ddp.evaluate(batch, tally);
    if (comm.rank() == Rank{0}) note(0, weights(ddp));

    const auto data = as_dataset(Numbers(8));
    DistributedSampler<Padding, InOrder> draws(8, comm.world_size(), comm.rank());
    DataLoader batches(data, draws, {.batch_size = 2, .workers = 2});
    DistributedDataParallel<Lines> other(comm);
    for (const TensorBatch& batch : batches) other.step(batch);
    if (comm.rank() == Rank{0}) note(1, weights(other));
  });
  for (const std::string& end : ends) BOOST_TEST(end == "");
  DataParallel<Lines> dp({.replicas = 2});
  auto whole = ::torch::data::make_data_loader(
      Numbers(8).map(Stack()), RankSampler<Padding, InOrder>(8, WorldSize{1}, Rank{0}), 4);
  for (auto& batch : *whole) dp.step(batch);
  note(2, weights(dp));
  for (std::size_t i = 0; i != 24; ++i) {
    BOOST_TEST((*results)[0][i] == (*results)[1][i]);
    BOOST_TEST((*results)[0][i] == (*results)[2][i], boost::test_tools::tolerance(1e-5f));
  }
  BOOST_TEST((*results)[0][1] != std::sin(1.f));  // it was trained
}

BOOST_AUTO_TEST_CASE(data_sets_of_libtorch_are_lockstep_s) {
  const auto samples = as_dataset(Numbers(7));
  static_assert(Dataset<decltype(samples)> && SampleSource<std::remove_const_t<decltype(samples)>>);
  TensorBatch batch;
  const std::size_t some[] = {4, 1, 6};
  samples.load(some, batch);
  BOOST_TEST(batch.inputs.sizes() == at::IntArrayRef({3, 2, 3}));
  BOOST_TEST(batch.inputs[2][1][2].item<float>() == 6);
  BOOST_TEST(at::equal(batch.labels, at::tensor({0, 1, 2}, at::kLong)));

  const auto stacked = as_dataset(Numbers(7).map(Stack()));
  static_assert(Dataset<decltype(stacked)>);
  Example<> example;
  stacked.load(some, example);
  BOOST_TEST(at::equal(example.data, batch.inputs));

  const auto doubled =
      samples | map([](const Example<>& one) { return Example<>(one.data * 2, one.target); }) |
      tensors({6});
  TensorBatch twice;
  doubled.load(some, twice);
  BOOST_TEST(at::equal(twice.inputs, (2 * batch.inputs).flatten(1)));
  BOOST_TEST(message_of([] { as_dataset(Unsized()); }).find("how many samples") !=
             std::string::npos);
}

BOOST_AUTO_TEST_CASE(each_thread_that_loads_has_a_data_set_of_its_own) {
  const auto data = as_dataset(Alone());
  DistributedSampler<Padding, InOrder> sampler(32, WorldSize{1}, Rank{0});
  DataLoader loader(data, sampler, {.batch_size = 2, .workers = 3});
  std::size_t rows = 0;
  BOOST_CHECK_NO_THROW(for (const TensorBatch& batch : loader) rows += batch.size());
  BOOST_TEST(rows == 32u);
}

BOOST_AUTO_TEST_SUITE_END()
