// SPDX-License-Identifier: Apache-2.0
// The stream of samples, as a loop sees it, is a function of the data, the seed and the epoch: the
// format that samples are kept in, workers, ranks, batch sizes and interruptions do not enter.
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fashion_mnist.hpp"
#include "lockstep/detail/core/hash.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/npy.hpp"
#include "lockstep/detail/data/pipeline.hpp"
#include "lockstep/detail/data/stage.hpp"
#include "lockstep/detail/data/tokens.hpp"
#include "message_of.hpp"
#include "temporary_folder.hpp"
#include "thread_count.hpp"
#if __has_include(<lmdb.h>)
#include "lockstep/detail/data/lmdb.hpp"
#endif

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(data_stream)

namespace {

constexpr std::size_t samples = 29;  // a prime: nothing divides
constexpr std::size_t width = 12;

std::uint8_t pixel(std::size_t i) { return static_cast<std::uint8_t>(i * 37 + i / 7); }
std::uint8_t label(std::size_t i) { return static_cast<std::uint8_t>(i % 10); }

/// The same samples in every format.
struct Formats : TemporaryFolder {
  Formats() {
    std::string pixels, labels;
    for (std::size_t i = 0; i != samples * width; ++i) {
      pixels += static_cast<char>(pixel(i));
      inputs.push_back(static_cast<float>(pixel(i)) / 255.f);
    }
    for (std::size_t i = 0; i != samples; ++i) {
      labels += static_cast<char>(label(i));
      classes.push_back(label(i));
    }
    const auto word = [](std::size_t n) { return std::string(3, '\0') + static_cast<char>(n); };
    write("train-images-idx3-ubyte",
          std::string("\0\0\x08\x03", 4) + word(samples) + word(3) + word(4) + pixels);
    write("train-labels-idx1-ubyte", std::string("\0\0\x08\x01", 4) + word(samples) + labels);
    write_npy(*this / "inputs.npy", inputs, {samples, 3, 4});
    write_npy(*this / "labels.npy", classes);
#if __has_include(<lmdb.h>)
    write_lmdb(*this / "train.lmdb", memory());
#endif
  }
  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(*this / name, std::ios::binary) << bytes;
  }

  InMemoryDataset<float, std::int32_t> memory() const { return {inputs, classes}; }
  ImageDataset idx() const { return idx_dataset("train", {.folder = path}); }
  NpyDataset<float, std::int32_t> npy() const {
    return npy_dataset<float, std::int32_t>(*this / "inputs.npy", *this / "labels.npy");
  }

  std::vector<float> inputs;
  std::vector<std::int32_t> classes;
};

/// A sample's bits.
template <class X, class Y>
std::uint64_t bits_of(const LabelledBatch<X, Y>& batch, std::size_t i) {
  detail::Hash hash;
  for (const X x : batch.row(i)) {
    std::uint32_t word = 0;
    std::memcpy(&word, &x, sizeof x);
    hash.number(word);
  }
  return hash.number(static_cast<std::uint64_t>(batch.labels[i])).value();
}

template <class Token>
std::uint64_t bits_of(const TokenBatch<Token>& batch, std::size_t i) {
  detail::Hash hash;
  for (const Token token : batch.row(i)) hash.number(token);
  return hash.value();
}

/// A change that draws twice, and sometimes waits, so that later batches are ready first.
auto shaken() {
  return map([](const auto& sample, RandomStream& random) {
    OwnedSample<float, std::int32_t> out{{sample.inputs.begin(), sample.inputs.end()},
                                         sample.label};
    for (float& x : out.inputs) x += random.uniform<float>();
    if (random.below(20) == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    return out;
  });
}

using Stream = std::vector<std::uint64_t>;

struct How {
  std::size_t world = 1;
  std::size_t workers = 0;
  std::size_t batch = 5;
};

/// What the ranks of a world draw in two epochs, put together in the order of the draws. Every rank
/// stops after `stop` batches of the second epoch, and a new job goes on in `then`.
template <class Order = TorchShuffle, class Source>
Stream stream(const Source& source, How how, std::size_t stop = 0, How then = {}) {
  Stream all;
  const auto weave = [&all](const std::vector<Stream>& ranks) {
    for (std::size_t k = 0; k != ranks[0].size(); ++k) {
      for (const Stream& rank : ranks) all.push_back(rank[k]);
    }
  };
  const auto run = [&](How now, std::uint64_t epoch, std::size_t stop_after,
                       const SamplerState* from) {
    SamplerState state;
    std::vector<Stream> ranks(now.world);
    for (std::size_t rank = 0; rank != now.world; ++rank) {
      DistributedSampler<Exact, Order> sampler(source.size(), WorldSize{now.world}, Rank{rank},
                                               {.seed = Seed{7}});
      DataLoader loader(source, sampler, {.batch_size = now.batch, .workers = now.workers});
      if (from != nullptr) loader.resume(*from);
      sampler.set_epoch(Epoch{epoch});
      std::size_t batches = 0;
      for (const auto& batch : loader) {
        for (std::size_t i = 0; i != batch.size(); ++i) ranks[rank].push_back(bits_of(batch, i));
        if (rank == 0) state = loader.state();
        if (++batches == stop_after) break;
      }
    }
    for (Stream& rank : ranks) rank.resize(ranks[0].size());  // Exact: some have one draw less
    weave(ranks);
    std::erase(all, 0);
    return state;
  };
  run(how, 0, 0, nullptr);
  const SamplerState state = run(how, 1, stop, nullptr);
  if (stop != 0) run(then, 1, 0, &state);
  return all;
}

}  // namespace

/// For an epoch that one world begins and another one ends, and for all workers in all worlds; or,
/// where `few`, for each of them once.
void expect_one_stream(const char* name, const auto& source, const Stream& expected,
                       bool few = false) {
  const std::vector<std::size_t> all_workers = {0, 1, 2, 4};
  for (const std::size_t world : {1, 2, 3, 4}) {
    for (const std::size_t workers : all_workers) {
      if (few && workers != all_workers[world % 4]) continue;
      BOOST_TEST_CONTEXT(name << ", " << world << " ranks, " << workers << " workers") {
        BOOST_TEST(stream(source, {world, workers}) == expected);
      }
    }
  }
  BOOST_TEST_CONTEXT(name << ", stopped and resumed") {
    BOOST_TEST(stream(source, {2, 2}, 2, {3, 1, 4}) == expected);
  }
}

BOOST_AUTO_TEST_CASE(every_format_gives_the_same_stream_whatever_workers_and_ranks) {
  const Formats formats;
  const Stream expected = stream(formats.memory(), {});
  BOOST_TEST(expected.size() == 2 * samples);
  expect_one_stream("memory", formats.memory(), expected, true);
  expect_one_stream("IDX", formats.idx(), expected, true);
  const TemporaryFolder local;
  const auto staged = npy_dataset<float, std::int32_t>(
      stage_locally(formats / "inputs.npy", local.path), formats / "labels.npy");
  expect_one_stream("npy, staged", staged, expected, true);
  expect_one_stream("npy", formats.npy(), expected);
#if __has_include(<lmdb.h>)
  expect_one_stream("LMDB", lmdb_dataset<float, std::int32_t>(formats / "train.lmdb"), expected,
                    true);
#endif
}

BOOST_AUTO_TEST_CASE(random_changes_belong_to_the_sample_and_not_to_who_makes_them) {
  const Formats formats;
  const auto memory = formats.memory() | shaken();
  const Stream expected = stream(memory, {});
  BOOST_TEST((expected != stream(formats.memory(), {})));
  expect_one_stream("memory, changed", memory, expected);
  // Samples that are alike are changed differently, and each of them differently in every epoch.
  const InMemoryDataset<float, std::int32_t> alike(std::vector<float>(samples * width),
                                                   std::vector<std::int32_t>(samples));
  const Stream changed = stream(alike | shaken(), {});
  BOOST_TEST(std::set(changed.begin(), changed.end()).size() == 2 * samples);
  BOOST_TEST((stream(formats.npy() | shaken(), {3, 2}) == expected));
#if __has_include(<lmdb.h>)
  const auto lmdb = lmdb_dataset<float, std::int32_t>(formats / "train.lmdb") | shaken();
  BOOST_TEST((stream(lmdb, {2, 4}, 1, {4, 0, 3}) == expected));
#endif
}

BOOST_AUTO_TEST_CASE(windows_of_tokens_come_as_one_stream) {
  const Formats formats;
  std::vector<std::uint16_t> tokens(8 * samples + 3);
  for (std::size_t i = 0; i != tokens.size(); ++i) tokens[i] = static_cast<std::uint16_t>(31 * i);
  formats.write("train.bin", {reinterpret_cast<const char*>(tokens.data()), 2 * tokens.size()});
  const TokenDataset<std::uint16_t> source(formats / "train.bin", 8);
  BOOST_TEST(source.size() == samples);
  expect_one_stream("tokens", source, stream(source, {}), true);
}

BOOST_AUTO_TEST_CASE(every_order_gives_one_stream_whatever_workers_and_ranks) {
  const Formats formats;
  const auto source = formats.memory();
  const auto compare = [&]<class Order>(Order) {
    const Stream expected = stream<Order>(source, {});
    for (const std::size_t world : {1, 2, 3, 4}) {
      BOOST_TEST((stream<Order>(source, {world, world - 1}) == expected), Order::name);
    }
    BOOST_TEST((stream<Order>(source, {3, 1}, 1, {2, 0, 7}) == expected), Order::name);
    return expected;
  };
  const Stream in_order = compare(InOrder{});
  for (const Stream& shuffled : {compare(KeyedShuffle{}), compare(BlockShuffle<4, 3>{})}) {
    BOOST_TEST((shuffled != in_order));
    // Every epoch has all samples, and an order of its own.
    const auto second = shuffled.begin() + samples;
    BOOST_TEST(std::set(shuffled.begin(), second).size() == samples);
    BOOST_TEST(std::set(second, shuffled.end()).size() == samples);
    BOOST_TEST(!std::equal(shuffled.begin(), second, second));
  }
}

/// Begins an epoch over `source`, does `harm()` after its first batch, and says what comes of it.
std::string words_after(const auto& source, std::size_t workers, const auto& harm) {
  DistributedSampler<> sampler(source.size(), WorldSize{1}, Rank{0});
  DataLoader loader(source, sampler, {.batch_size = 2, .workers = workers, .prefetch = 1});
  std::size_t batches = 0;
  return message_of([&] {
    for ([[maybe_unused]] const auto& batch : loader) {
      if (batches++ == 0) harm();
    }
  });
}

BOOST_AUTO_TEST_CASE(a_file_that_is_cut_in_mid_epoch_is_named_where_its_batch_was_due) {
  const auto each = [](const char* file, const auto& open, std::size_t most_workers = 2) {
    for (std::size_t workers = 0; workers <= most_workers; workers += 2) {
      const Formats formats;
      const std::string path = formats / file;
      const auto source = open(formats);
      const std::string words = words_after(source, workers, [&] {
        // Workers have read ahead as far as they may, and none is in the middle of a page.
        if (workers != 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
        std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
      });
      BOOST_TEST(words.find(path) != std::string::npos, words);
      BOOST_TEST(words.find("sample") != std::string::npos, words);
    }
  };
  each("inputs.npy", [](const Formats& formats) { return formats.npy(); });
  each("labels.npy", [](const Formats& formats) { return formats.npy() | shaken(); });
  each("train-images-idx3-ubyte", [](const Formats& formats) { return formats.idx(); });
#if __has_include(<lmdb.h>)
  // LMDB is mapped: the system ends a program whose page is cut between the look at the file and
  // the read, and a worker may be there.
  const auto open = [](const Formats& formats) {
    return lmdb_dataset<float, std::int32_t>(formats / "train.lmdb");
  };
  each("train.lmdb", open, 0);
#endif
}

BOOST_AUTO_TEST_CASE(a_file_that_is_replaced_in_mid_epoch_is_read_to_its_end) {
  const Formats formats;
  const auto each = [&](const char* file, const auto& source) {
    const Stream expected = stream(source, {});
    const std::string path = formats / file;
    const std::string words = words_after(source, 2, [&] {
      formats.write("other", "another file");
      std::filesystem::rename(formats / "other", path);
    });
    BOOST_TEST(words == "nothing was thrown", file);
    BOOST_TEST(stream(source, {2, 1}) == expected, file);
  };
  each("inputs.npy", formats.npy());
  each("train-images-idx3-ubyte", formats.idx());
#if __has_include(<lmdb.h>)
  each("train.lmdb", lmdb_dataset<float, std::int32_t>(formats / "train.lmdb"));
#endif
}

BOOST_AUTO_TEST_CASE(a_change_that_throws_names_its_sample_and_ends_every_thread) {
  const Formats formats;
  const std::size_t before = thread_count();
  for (const std::size_t workers : {0, 1, 2, 4}) {
    const auto source = formats.npy() | map([](const auto& sample, RandomStream&) {
                          if (sample.inputs[0] == static_cast<float>(pixel(17 * width)) / 255.f)
                            throw std::out_of_range("no such crop");
                          return sample;
                        });
    const std::string words = words_after(source, workers, [] {});
    BOOST_TEST(words.find("sample 17 ") != std::string::npos, words);
    BOOST_TEST(words.find("no such crop") != std::string::npos, words);
    BOOST_TEST(thread_count() == before);
  }
}

BOOST_AUTO_TEST_SUITE_END()
