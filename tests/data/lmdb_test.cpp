// SPDX-License-Identifier: Apache-2.0
// LMDB sets: written and read again by threads and forked ranks, and every fault in words.
#include <boost/test/unit_test.hpp>

#if __has_include(<lmdb.h>)

#include <fcntl.h>
#include <lmdb.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/disk.hpp"
#include "checkpoint/process.hpp"
#include "launch/watchdog.hpp"
#include "lockstep/detail/core/random_stream.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/lmdb.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/pipeline.hpp"
#include "skipped.hpp"
#include "temporary_folder.hpp"

BOOST_FIXTURE_TEST_SUITE(data_lmdb, Watchdog)

namespace {

using namespace lockstep;
using checkpoint_tests::Process;
namespace fs = std::filesystem;

using Points = InMemoryDataset<float, std::int32_t>;
using Point = LabelledSample<float, std::int32_t>;

Points points(std::size_t count, std::size_t width) {
  std::vector<float> inputs(count * width);
  std::iota(inputs.begin(), inputs.end(), 1.f);
  std::vector<std::int32_t> labels(count);
  std::iota(labels.begin(), labels.end(), -3);
  return {std::move(inputs), std::move(labels)};
}

auto labelled(const std::string& path, const LmdbOptions& options = {}) {
  return lmdb_dataset<float, std::int32_t>(path, options);
}

// Samples are the same in every pass, so that DeviceResident takes them.
static_assert(!detail::changes_by_pass<LmdbDataset<Point>>());

/// Whether sample i of two sources is the same; throws what reading throws.
bool is_same(const auto& a, const auto& b, std::size_t i) {
  Point of_a;
  Point of_b;
  a.read(i, of_a);
  b.read(i, of_b);
  return of_a.label == of_b.label && std::ranges::equal(of_a.inputs, of_b.inputs);
}

bool is_same(const auto& a, const auto& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = a.size(); i-- != 0;)
    if (!is_same(a, b, i)) return false;
  return true;
}

/// Texts as records.
struct Texts {
  using sample_type = std::string;
  std::vector<std::string> texts;
  std::size_t size() const { return texts.size(); }
  void read(std::size_t index, std::string& out) const { out = texts[index]; }
};

void encode_text(const std::string& text, std::vector<std::byte>& out) {
  const auto bytes = std::as_bytes(std::span(text));
  out.assign(bytes.begin(), bytes.end());
}

void decode_text(std::span<const std::byte> record, std::string& out) {
  out.assign(reinterpret_cast<const char*>(record.data()), record.size());
}

std::vector<std::string> texts_of(const std::string& path, const LmdbOptions& options = {}) {
  const auto set = lmdb_dataset<std::string>(path, decode_text, options);
  std::vector<std::string> all(set.size());
  for (std::size_t i = 0; i != all.size(); ++i) set.read(i, all[i]);
  return all;
}

/// Writes pairs of key and value as any program does, into a file that may be there.
void put(const std::string& path, const std::vector<std::pair<std::string, std::string>>& pairs,
         unsigned flags = 0) {
  MDB_env* environment = nullptr;
  MDB_txn* transaction = nullptr;
  MDB_dbi handle = 0;
  const auto require = [](int code) { BOOST_TEST_REQUIRE(code == 0, mdb_strerror(code)); };
  require(mdb_env_create(&environment));
  require(mdb_env_open(environment, path.c_str(), MDB_NOSUBDIR | MDB_NOLOCK, 0666));
  require(mdb_txn_begin(environment, nullptr, 0, &transaction));
  require(mdb_dbi_open(transaction, nullptr, MDB_CREATE | flags, &handle));
  for (auto [key, value] : pairs) {
    MDB_val k{key.size(), key.data()};
    MDB_val v{value.size(), value.data()};
    require(mdb_put(transaction, handle, &k, &v, 0));
  }
  require(mdb_txn_commit(transaction));
  mdb_env_close(environment);
}

std::string write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

template <class T>
void set_at(std::string& bytes, std::size_t offset, T value) {
  std::memcpy(bytes.data() + offset, &value, sizeof value);
}

/// An LMDB file of one leaf page, byte by byte, as liblmdb writes it on a machine of such pages.
std::string file_by_hand(std::size_t page_bytes, const std::vector<std::string>& records) {
  std::string file(3 * page_bytes, '\0');
  for (std::size_t page = 0; page != 2; ++page) {
    const std::size_t at = page * page_bytes;
    set_at<std::uint64_t>(file, at, page);
    set_at<std::uint16_t>(file, at + 10, 0x08);  // a meta page
    set_at<std::uint32_t>(file, at + 16, 0xBEEFC0DE);
    set_at<std::uint32_t>(file, at + 20, 1);
    set_at<std::uint64_t>(file, at + 32, 1 << 20);
    set_at<std::uint32_t>(file, at + 40, static_cast<std::uint32_t>(page_bytes));
    set_at<std::uint16_t>(file, at + 44, 0x08);              // keys of the free list are integers
    set_at<std::uint64_t>(file, at + 80, ~std::uint64_t{});  // which is empty
    set_at<std::uint16_t>(file, at + 94, 1);                 // the main database: its depth,
    set_at<std::uint64_t>(file, at + 104, 1);                // leaf pages,
    set_at<std::uint64_t>(file, at + 120, records.size());
    set_at<std::uint64_t>(file, at + 128, 2);  // root,
    set_at<std::uint64_t>(file, at + 136, 2);  // the last page
    set_at<std::uint64_t>(file, at + 144, page);
  }
  const std::size_t leaf = 2 * page_bytes;
  std::size_t upper = page_bytes;
  for (std::size_t i = 0; i != records.size(); ++i) {
    upper -= 16 + records[i].size();
    set_at<std::uint16_t>(file, leaf + 16 + 2 * i, static_cast<std::uint16_t>(upper));
    set_at<std::uint16_t>(file, leaf + upper, static_cast<std::uint16_t>(records[i].size()));
    set_at<std::uint16_t>(file, leaf + upper + 6, 8);  // the size of the key
    file[leaf + upper + 15] = static_cast<char>(i);
    file.replace(leaf + upper + 16, records[i].size(), records[i]);
  }
  set_at<std::uint64_t>(file, leaf, 2);
  set_at<std::uint16_t>(file, leaf + 10, 0x02);  // a leaf
  set_at<std::uint16_t>(file, leaf + 12, static_cast<std::uint16_t>(16 + 2 * records.size()));
  set_at<std::uint16_t>(file, leaf + 14, static_cast<std::uint16_t>(upper));
  return file;
}

/// How often a file is mapped into this process.
std::size_t maps_of(const std::string& path) {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.ends_with(path) ? 1 : 0;
  return count;
}

void expect(const auto& f, const std::vector<std::string>& parts) {
  const std::string words = error_of(f);
  for (const std::string& part : parts)
    BOOST_TEST(words.find(part) != std::string::npos, "'" + words + "' lacks '" + part + "'");
}

/// Runs `f` in a child; its exception or `false` is an error of this test.
void in_child(auto f) {
  Process child([&] { return f() ? 0 : 1; });
  BOOST_TEST(child.words() == "");
  BOOST_TEST(child.end() == 0);
}

}  // namespace

BOOST_AUTO_TEST_CASE(what_is_written_is_read_again) {
  const TemporaryFolder folder;
  // Several records in a page, one, one with pages of its own; a width that is no multiple of 8.
  for (const std::size_t width : {1, 7, 784, 5000}) {
    const Points source = points(300, width);
    const std::string path = folder / std::to_string(width);
    write_lmdb(path, source, {}, 100'000);
    const auto set = labelled(path);
    BOOST_TEST(is_same(set, source));

    const std::vector<std::size_t> indices{299, 0, 17, 17};
    Points::batch_type expected;
    Points::batch_type batch;
    source.load(indices, expected);
    set.load(indices, batch);
    expect([&] { set.load(std::vector<std::size_t>{0, 300}, batch); }, {"record 300 of '"});
    set.load(indices, batch);
    BOOST_TEST(batch.inputs == expected.inputs);
    BOOST_TEST(batch.labels == expected.labels);
    BOOST_TEST(batch.weights == expected.weights);
  }
  BOOST_TEST(folder.files().size() == 4u);  // no lock file, no temporary
}

BOOST_AUTO_TEST_CASE(records_are_encoded_and_decoded_by_the_programs_functions) {
  const TemporaryFolder folder;
  const Texts source{{"first", "", std::string(10'000, 'x'), "last"}};
  write_lmdb(folder / "texts", source, encode_text);
  BOOST_TEST(texts_of(folder / "texts") == source.texts);
  write_lmdb(folder / "none", Texts{}, encode_text);
  BOOST_TEST(texts_of(folder / "none").empty());
}

BOOST_AUTO_TEST_CASE(a_set_is_a_file_or_a_folder) {
  const TemporaryFolder folder;
  const Points source = points(10, 2);
  fs::create_directory(folder / "set");
  write_lmdb(folder / "set/data.mdb", source);
  for (const char* name : {"set", "set/", "set/data.mdb"})
    BOOST_TEST(is_same(labelled(folder / name), source));
}

BOOST_AUTO_TEST_CASE(records_under_other_keys_come_in_the_order_of_their_keys) {
  const TemporaryFolder folder;
  const std::string path = folder / "set";
  put(path, {{"c", "three"}, {"a", "one"}, {"__len__", "3"}, {"b", "two"}});
  using List = std::vector<std::string>;
  BOOST_TEST(texts_of(path) == (List{"3", "one", "two", "three"}));
  const LmdbOptions letters{.is_sample = [](std::string_view key) { return key.size() == 1; }};
  BOOST_TEST(texts_of(path, letters) == (List{"one", "two", "three"}));

  const std::string several = folder / "several";
  put(several, {{"k", "1"}, {"k", "2"}, {"l", "3"}}, MDB_DUPSORT);
  expect([&] { texts_of(several); },
         {"'" + several + "' has several values under one key", "MDB_DUPSORT"});

  // The first and the last key look like ours, and one between does not.
  using namespace std::string_literals;
  const std::string gap = folder / "gap";
  put(gap, {{"\0\0\0\0\0\0\0\0"s, "0"}, {"\0\0\0\0\0\0\0\0x"s, "?"}, {"\0\0\0\0\0\0\0\2"s, "2"}});
  expect([&] { texts_of(gap); }, {"'" + gap + "' has no key 1", "is_sample"});
  const LmdbOptions all{.is_sample = [](std::string_view) { return true; }};
  BOOST_TEST(texts_of(gap, all) == (List{"0", "?", "2"}));
}

BOOST_AUTO_TEST_CASE(files_of_machines_with_other_pages_are_read) {
  const TemporaryFolder folder;
  const std::vector<std::string> records{"one", "three", "seventeen"};
  for (const std::size_t page : {512, 4096, 16384, 32768}) {
    const std::string path = write(folder / std::to_string(page), file_by_hand(page, records));
    BOOST_TEST(texts_of(path) == records);
  }
}

BOOST_AUTO_TEST_CASE(every_file_that_is_no_whole_lmdb_is_named) {
  const TemporaryFolder folder;
  const std::string good = file_by_hand(4096, {"one", "two"});
  const auto rejects = [&](const std::string& bytes, const std::vector<std::string>& parts) {
    const std::string path = write(folder / "bad", bytes);
    expect([&] { texts_of(path); }, parts);
    expect([&] { texts_of(path); }, {"lmdb_dataset: '" + path + "'"});
  };
  const auto with = [&](std::size_t offset, auto value) {
    std::string bytes = good;
    set_at(bytes, offset, value);
    return bytes;
  };
  using Word = std::uint32_t;
  rejects("", {"has 0 bytes", "the meta page at offset 0"});
  rejects(good.substr(0, 4100), {"has 4100 bytes", "the meta page at offset 4096"});
  rejects(std::string(10'000, '?'), {"is no LMDB file", "offset 16", "0xBEEFC0DE"});
  rejects(with(16, Word{0xDEC0EFBE}), {"of a 64-bit little-endian machine", "mdb_dump"});
  rejects(with(20, Word{999}), {"an LMDB file of format 999", "format 1 "});
  rejects(with(40, Word{12345}), {"pages of 12345 bytes", "256 to 32768"});
  rejects(with(40, Word{65536}), {"pages of 65536 bytes"});
  rejects(with(4096 + 16, Word{0}), {"is no LMDB file", "offset 4112"});
  rejects(with(4096 + 40, Word{8192}), {"page 1 has another size than the first"});
  for (const std::size_t bytes : {8192, 9000, 12287})
    rejects(good.substr(0, bytes), {"is cut off: it has " + std::to_string(bytes) + " bytes",
                                    "last page, 2, ends behind them"});
  rejects(with(4096 + 136, ~std::uint64_t{}), {"is cut off", "18446744073709551615"});

  expect([&] { texts_of(folder / "nothing"); },
         {"'" + (folder / "nothing") + "' cannot be read: No such file"});
  expect([&] { texts_of(folder.path); }, {"/data.mdb' cannot be read: No such file"});
  expect([&] { texts_of("/dev/null"); }, {"'/dev/null' is no regular file"});
  write(folder / "secret", good);
  fs::permissions(folder / "secret", fs::perms::none);
  fs::permissions(folder.path, fs::perms::all);
  in_child([&] {
    if (::geteuid() == 0 && ::seteuid(65534) != 0) {
      say_skipped("an LMDB file without permission (no other user here)");
      return true;
    }
    const std::string words = error_of([&] { texts_of(folder / "secret"); });
    return words.find("secret' cannot be read: Permission denied") != std::string::npos;
  });
}

BOOST_AUTO_TEST_CASE(flipped_bytes_are_errors_in_words_or_other_bytes_and_never_a_signal) {
  const TemporaryFolder folder;
  struct Original {
    std::string bytes;
    LmdbOptions options;
  };
  std::vector<Original> originals;
  const auto add = [&](const LmdbOptions& options = {}) {
    std::ifstream in(folder / "set", std::ios::binary);
    originals.push_back({{std::istreambuf_iterator<char>(in), {}}, options});
    fs::remove(folder / "set");
  };
  Texts small;  // a tree of three levels
  for (int i = 0; i != 2500; ++i) small.texts.push_back("record " + std::to_string(i));
  write_lmdb(folder / "set", small, encode_text);
  add();
  Texts large;  // with pages of their own
  for (std::size_t i = 0; i != 12; ++i) large.texts.emplace_back(3000 + 500 * i, 'x');
  write_lmdb(folder / "set", large, encode_text);
  add();
  originals.push_back({file_by_hand(512, {"one", "two", "three"}), {}});
  std::vector<std::pair<std::string, std::string>> pairs;
  for (int i = 0; i != 600; ++i)
    pairs.emplace_back("key of " + std::to_string(i), std::string(i % 40, 'y'));
  put(folder / "set", pairs);
  add();
  for (const Original& original : originals)
    BOOST_TEST(!texts_of(write(folder / "whole", original.bytes), original.options).empty());

  // Each batch in a child, whose end by a signal is an error that names it.
  const char* const wanted = std::getenv("LOCKSTEP_LMDB_MUTATIONS");
  const std::size_t mutations = wanted != nullptr ? std::strtoul(wanted, nullptr, 10) : 1000;
  constexpr std::size_t batch = 50;
  std::size_t errors = 0;
  for (std::size_t first = 0; first < mutations; first += batch) {
    Process child([&] {
      std::size_t rejected = 0;
      for (std::size_t seed = first; seed != first + batch; ++seed) {
        RandomStream random(Seed{seed});
        const Original& original = originals[seed % originals.size()];
        std::string bytes = original.bytes;
        for (std::size_t n = 1 + random.below(8); n != 0; --n) {
          // Half of them in the first bytes of pages, where their structure is.
          std::size_t at = random.below(bytes.size());
          if (random.below(2) == 0) at = at / 512 * 512 + random.below(64);
          if (at < bytes.size()) bytes[at] = static_cast<char>(random.below(256));
        }
        const std::string path = write(folder / ("bad" + std::to_string(seed)), bytes);
        const std::string words = error_of([&] { texts_of(path, original.options); });
        if (!words.empty() && words.find("'" + path + "'") == std::string::npos)
          throw std::runtime_error("seed " + std::to_string(seed) + ": " + words);
        rejected += words.empty() ? 0 : 1;
        fs::remove(path);
      }
      return static_cast<int>(rejected);
    });
    BOOST_TEST(child.words() == "");
    const int end = child.end();
    BOOST_TEST((end >= 0 && end <= static_cast<int>(batch)),
               "seeds from " << first << " end with " << end);
    errors += static_cast<std::size_t>(std::max(end, 0));
  }
  BOOST_TEST(errors > mutations / 10);
  BOOST_TEST(errors < mutations);
}

BOOST_AUTO_TEST_CASE(types_and_indices_are_checked) {
  const TemporaryFolder folder;
  const std::string path = folder / "set";
  write_lmdb(path, points(5, 2));
  LabelledSample<double, std::int32_t> wrong;
  const auto doubles = lmdb_dataset<double, std::int32_t>(path);
  expect([&] { doubles.read(3, wrong); },
         {"record 3 of '" + path +
              "', 32 bytes: it holds float inputs and int32 labels, and double "
              "and int32 are asked for",
          "lmdb_dataset<X, Y>"});
  const auto set = labelled(path);
  Point point;
  expect([&] { set.read(5, point); }, {"record 5 of '" + path + "', which has 5", "below size()"});

  const std::string texts = folder / "texts";
  std::vector<std::byte> record;
  detail::LabelledCodec{}(OwnedSample<float, std::int32_t>{{1, 2}, 7}, record);
  std::string own(reinterpret_cast<const char*>(record.data()), record.size());
  std::string longer = own;
  set_at<std::uint64_t>(longer, 8, 1000);
  std::string other = own;
  other[4] = 99;
  write_lmdb(texts, Texts{{"short", std::string(40, 'x'), longer, own.substr(0, 24), other}},
             encode_text);
  const auto foreign = labelled(texts);
  const auto rejects = [&](std::size_t index, const std::string& part) {
    expect([&] { foreign.read(index, point); }, {part});
  };
  rejects(0, "does not begin as the records of write_lmdb do, with 'LSR1'");
  rejects(1, "'LSR1'");
  rejects(2, "it promises 1000 inputs of 4 bytes, and has 8 bytes");
  rejects(3, "it promises 2 inputs of 4 bytes, and has 0 bytes");
  rejects(4, "element types, at its bytes 4 and 5");
}

BOOST_AUTO_TEST_CASE(a_record_that_cannot_be_decoded_is_named) {
  const TemporaryFolder folder;
  const std::string path = folder / "set";
  write_lmdb(path, Texts{{"1", "2", "three", "4"}}, encode_text);
  const auto set =
      lmdb_dataset<LabelledSample<float, std::int32_t>>(path, [](auto record, Point& out) {
        std::string text;
        decode_text(record, text);
        out.label = std::stoi(text);
      });
  Point point;
  expect([&] { set.read(2, point); }, {"lmdb_dataset: record 2 of '" + path + "', 5 bytes: stoi"});
  try {
    set.read(2, point);
  } catch (const std::exception& error) {
    BOOST_CHECK_THROW(std::rethrow_if_nested(error), std::invalid_argument);
  }
  for (const std::size_t workers : {0, 2}) {
    DistributedSampler<Padding, InOrder> sampler(set.size(), WorldSize{1}, Rank{0});
    DataLoader loader(set, sampler, {.batch_size = 2, .workers = workers});
    std::size_t batches = 0;
    expect(
        [&] {
          for (const auto& batch : loader) batches += batch.size() / 2;
        },
        {"DataLoader: sample 2 (draw 0 of batch 1", "record 2 of '" + path});
    BOOST_TEST(batches == 1u);
  }
}

BOOST_AUTO_TEST_CASE(threads_read_one_set) {
  const TemporaryFolder folder;
  const Points source = points(2000, 20);
  const std::string path = folder / "set";
  write_lmdb(path, source);
  // Listed records and records by key, by threads with data sets of their own and with a common
  // one.
  const LmdbOptions all{.is_sample = [](std::string_view) { return true; }};
  for (const LmdbOptions& options : {LmdbOptions{}, all}) {
    const auto common = labelled(path, options);
    std::vector<int> right(4);
    std::vector<std::jthread> threads;
    for (std::size_t t = 0; t != right.size(); ++t) {
      threads.emplace_back([&, t] {
        const auto own = labelled(path, options);
        right[t] = 1;
        for (std::size_t i = 0; i != source.size(); ++i) {
          const std::size_t index = (i * 7 + t * 501) % source.size();
          if (!is_same(i % 2 == 0 ? own : common, source, index)) right[t] = 0;
        }
      });
    }
    threads.clear();
    BOOST_TEST(right == std::vector<int>(4, 1));
    const auto copy = common;
    BOOST_TEST(is_same(copy, source));
    BOOST_TEST(maps_of(path) == 1u);  // which copies share
  }
  BOOST_TEST(maps_of(path) == 0u);
}

BOOST_AUTO_TEST_CASE(a_loader_gives_the_same_batches_for_any_number_of_workers) {
  const TemporaryFolder folder;
  const Points source = points(500, 6);
  write_lmdb(folder / "set", source);
  const auto set = labelled(folder / "set");
  const auto stream = [](const auto& dataset, std::size_t workers) {
    DistributedSampler<> sampler(dataset.size(), WorldSize{2}, Rank{1});
    DataLoader loader(dataset, sampler, {.batch_size = 32, .workers = workers});
    std::vector<float> all;
    for (const auto& batch : loader)
      all.insert(all.end(), batch.inputs.begin(), batch.inputs.end());
    return all;
  };
  const std::vector<float> expected = stream(source, 0);
  for (const std::size_t workers : {0, 1, 3}) BOOST_TEST((stream(set, workers) == expected));
}

BOOST_AUTO_TEST_CASE(forked_ranks_go_on_reading) {
  const TemporaryFolder folder;
  const Points source = points(1000, 20);
  const std::string path = folder / "set";
  write_lmdb(path, source);
  const LmdbOptions every{.is_sample = [](std::string_view) { return true; }};
  auto keyed = labelled(path);  // looked up by key
  auto listed = labelled(path, every);
  BOOST_TEST(is_same(keyed, source));  // some are looked up before
  const auto reads = [&] {
    const auto own = labelled(path);
    return is_same(keyed, source) && is_same(listed, source) && is_same(own, source);
  };
  in_child(reads);
  in_child([&] {  // grandchildren, threads, and the end of what the parent has opened
    bool right = reads();
    Process child([&] { return reads() ? 0 : 1; });
    right = right && child.end() == 0;
    std::vector<int> of_threads(3);
    {
      std::vector<std::jthread> threads;
      for (int& mine : of_threads) threads.emplace_back([&] { mine = reads() ? 1 : 0; });
    }
    right = right && of_threads == std::vector<int>(3, 1);
    {
      const auto gone = std::move(keyed);
      const auto gone_too = std::move(listed);
    }
    return right && is_same(labelled(path), source);
  });
  in_child([&] {  // which never reads before it ends
    const auto gone = std::move(keyed);
    return true;
  });
  BOOST_TEST(reads());  // nothing that children did or closed matters here

  // A child goes on with the file that its parent has opened, whatever is there now.
  fs::rename(path, folder / "old");
  write_lmdb(path, points(10, 20));
  in_child([&] { return is_same(keyed, source) && labelled(path).size() == 10; });
  BOOST_TEST(is_same(keyed, source));
}

BOOST_AUTO_TEST_CASE(a_set_that_changes_while_it_is_open_is_an_error) {
  const TemporaryFolder folder;
  const std::string path = folder / "set";
  const Points source = points(100, 50);
  write_lmdb(path, source);
  const std::vector<std::size_t> first{0};
  Point point;
  Points::batch_type batch;
  {
    const auto set = labelled(path);
    set.read(0, point);
    put(path, {{"zzz", "one more"}});
    const std::vector<std::string> written{"'" + path + "' has changed while it was in use",
                                           "were written to", "rename"};
    // It may have grown, too.
    const std::vector<std::string> changed_set{"'" + path + "' has changed while it was in use"};
    expect([&] { set.read(0, point); }, changed_set);
    expect([&] { set.load(first, batch); }, changed_set);
    BOOST_TEST(texts_of(path).size() == 101u);  // who opens it now reads what is there now
    // Bytes that change without a transaction are seen by the file's time, before the next batch.
    const auto later = labelled(path);
    later.load(first, batch);
    std::fstream(path, std::ios::in | std::ios::out | std::ios::binary).seekp(9000) << "?";
    fs::last_write_time(path, fs::last_write_time(path) + std::chrono::seconds(1));
    expect([&] { later.load(first, batch); }, written);
    const auto changed = later | map([](auto& sample) { sample.label = 0; });
    expect([&] { changed.load(first, batch); }, written);  // which a pipeline asks for, too
    expect([&] { write_lmdb(folder / "copy", later); }, written);
    const auto now = labelled(path);
    fs::resize_file(path, 10'000);
    expect([&] { now.load(first, batch); },
           {"'" + path + "' has changed while it was in use: it had "});
  }
  // What is replaced by another file stays readable, and the next one opens the other.
  fs::remove(path);
  write_lmdb(path, source);
  const auto set = labelled(path);
  write_lmdb(folder / "next", points(7, 50));
  fs::rename(folder / "next", path);
  BOOST_TEST(is_same(set, source));
  BOOST_TEST(labelled(path).size() == 7u);
}

BOOST_AUTO_TEST_CASE(a_set_is_written_as_a_whole_or_not_at_all) {
  const TemporaryFolder folder;
  const std::string path = folder / "set";
  const Points source = points(10, 2);
  constexpr std::size_t commit_bytes = 1;
  expect(
      [&] {
        write_lmdb(
            path, Texts{{"good", "bad"}},
            [](const std::string& text, std::vector<std::byte>& out) {
              if (text == "bad") throw std::runtime_error("bad words");
              encode_text(text, out);
            },
            commit_bytes);
      },
      {"sample 1", "bad words"});
  BOOST_TEST(folder.files().empty());

  // A writer that is killed leaves a temporary, which the next one removes.
  {
    Process killed([&] {
      write_lmdb(
          path, Texts{{"good", "bad"}},
          [](const std::string& text, std::vector<std::byte>& out) {
            if (text == "bad") ::raise(SIGKILL);
            encode_text(text, out);
          },
          commit_bytes);
      return 0;
    });
    BOOST_TEST(killed.end() == -SIGKILL);
  }
  BOOST_TEST(folder.files().size() == 1u);
  BOOST_TEST(!fs::exists(path));

  // One writes at a time.
  write_lmdb(
      path, Texts{{"only"}},
      [&](const std::string& text, std::vector<std::byte>& out) {
        BOOST_TEST(folder.files().size() == 1u);
        expect([&] { write_lmdb(path, source, {}, commit_bytes); },
               {"write_lmdb: '" + path + "' is being written"});
        encode_text(text, out);
      },
      commit_bytes);
  BOOST_TEST(folder.files() == std::vector<std::string>{"set"});
  fs::remove(path);

  // A path that comes up while it is written stays as it is.
  expect(
      [&] {
        write_lmdb(
            path, Texts{{"late"}},
            [&](const std::string& text, std::vector<std::byte>& out) {
              write_lmdb(folder / "other", source, {}, commit_bytes);
              fs::rename(folder / "other", path);
              encode_text(text, out);
            },
            commit_bytes);
      },
      {"write_lmdb: '" + path + "' is there already"});
  BOOST_TEST(folder.files() == std::vector<std::string>{"set"});
  BOOST_TEST(is_same(labelled(path), source));
  expect([&] { write_lmdb(path, source, {}, commit_bytes); },
         {"write_lmdb: '" + path + "' is there already", "remove it first"});
  fs::remove_all(path);
  expect([&] { write_lmdb(folder / "no/folder/set", source); },
         {"cannot be written: No such file or directory"});
}

struct Large {
  using sample_type = std::string;
  std::size_t size() const { return 9; }
  void read(std::size_t index, std::string& out) const {
    out.assign(5 << 20, static_cast<char>('a' + index));
  }
};

BOOST_AUTO_TEST_CASE(the_map_grows_with_the_set) {
  const TemporaryFolder folder;
  write_lmdb(folder / "set", Large{}, encode_text);  // 45 MiB, from 16
  const auto set = lmdb_dataset<std::size_t>(folder / "set", [](auto record, std::size_t& out) {
    out = record.size() * 256 + static_cast<std::size_t>(record.back());
  });
  std::size_t last = 0;
  set.read(8, last);
  BOOST_TEST(set.size() == 9u);
  BOOST_TEST(last == (5u << 20) * 256 + 'i');
}

BOOST_AUTO_TEST_CASE(a_full_disk_is_an_error_and_leaves_nothing) {
  checkpoint_tests::on_disk("size=1m", [](const std::string& folder) {
    using checkpoint_tests::require;
    const std::string path = folder + "/set";
    for (const std::size_t commit_bytes : {std::size_t{1}, std::size_t{100'000}, 16_MiB}) {
      checkpoint_tests::require_error(
          [&] { write_lmdb(path, points(1000, 500), {}, commit_bytes); },
          {"write_lmdb: '" + path + "' cannot be written: No space left on device", "make room"});
      require(fs::is_empty(folder), "something is left");
    }
    write_lmdb(path, points(100, 50));
    require(is_same(labelled(path), points(100, 50)), "it is another");
  });
}

BOOST_AUTO_TEST_SUITE_END()

#else

#include <cstdio>

BOOST_AUTO_TEST_SUITE(data_lmdb)

BOOST_AUTO_TEST_CASE(skipped_without_liblmdb) { say_skipped("LMDB files (no lmdb.h here)"); }

BOOST_AUTO_TEST_SUITE_END()

#endif
