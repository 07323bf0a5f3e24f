// SPDX-License-Identifier: Apache-2.0
// Files written and read back, damaged in every way that happens to files, and not writable.
#include <sys/resource.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/folder.hpp"
#include "checkpoint/sample.hpp"
#include "lockstep/detail/checkpoint/reader.hpp"
#include "lockstep/detail/core/half.hpp"
#include "skipped.hpp"

BOOST_AUTO_TEST_SUITE(checkpoint_safetensors)

namespace {

using namespace checkpoint;
using namespace lockstep;
using namespace lockstep::detail;

/// All bytes of a tensor.
std::vector<std::byte> bytes_of(const SafetensorsFile& file, const TensorEntry& tensor) {
  std::vector<std::byte> bytes(tensor.bytes);
  file.read(tensor, 0, bytes);
  return bytes;
}

/// Opens a file as a loader does, and checks everything.
void read_whole(const std::string& path) { CheckpointReader(path).verify(); }

}  // namespace

BOOST_AUTO_TEST_CASE(random_files_come_back_as_they_were) {
  const Folder folder;
  const std::string path = folder / "a.safetensors";
  for (std::uint64_t stream = 0; stream < 150; ++stream) {
    const Sample sample = random_sample(stream);
    const ShardFile written = write_file(path, sample.file);
    const SafetensorsFile file(path);
    BOOST_TEST(written.bytes == fs::file_size(path));
    BOOST_TEST(file.bytes() == written.bytes);
    BOOST_TEST((file.digest() == written.digest));
    BOOST_TEST(file.facts().at("version").natural() == 1u);
    BOOST_TEST(holds(sample.file.facts.text(),
                     "\"step\":" + std::to_string(file.facts().at("step").natural())));
    BOOST_TEST(*file.metadata("format") == "pt");
    for (const auto& [key, value] : sample.file.metadata) BOOST_TEST(*file.metadata(key) == value);
    BOOST_TEST_REQUIRE(file.tensors().size() == sample.file.tensors.size());
    Random random{stream};
    for (const TensorToWrite& tensor : sample.file.tensors) {
      const TensorEntry* const entry = file.find(tensor.name);
      BOOST_TEST_REQUIRE(entry != nullptr);
      BOOST_TEST((entry->kind() == tensor.kind && entry->shape == tensor.shape));
      BOOST_TEST(entry->begin % element_size(tensor.kind) == 0u);  // elements are aligned
      BOOST_TEST(std::ranges::equal(bytes_of(file, *entry), tensor.data));
      std::vector<std::byte> part(random.below(tensor.data.size() + 1));
      const std::size_t first = random.below(tensor.data.size() - part.size() + 1);
      file.read(*entry, first, part);
      BOOST_TEST(std::ranges::equal(part, tensor.data.subspan(first, part.size())));
    }
    BOOST_TEST(file.find("no such") == nullptr);
    file.verify();
    read_whole(path);
  }
  BOOST_TEST(std::distance(fs::directory_iterator(folder.path), {}) == 1);  // no temporary is left
}

BOOST_AUTO_TEST_CASE(the_file_is_what_the_format_says) {
  // By another parser: the length, the JSON, data without holes.
  const Folder folder;
  for (std::uint64_t stream = 200; stream < 240; ++stream) {
    const Sample sample = random_sample(stream);
    write_file(folder / "a", sample.file);
    const std::string bytes = content(folder / "a");
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    BOOST_TEST(length % 8 == 0u);
    const auto header = nlohmann::json::parse(bytes.substr(8, length));
    BOOST_TEST(header.size() == sample.file.tensors.size() + 1);
    for (const auto& [key, value] : header["__metadata__"].items()) BOOST_TEST(value.is_string());
    std::size_t total = 8 + length;
    for (const TensorToWrite& tensor : sample.file.tensors) {
      const auto& entry = header[tensor.name];
      const std::size_t begin = entry["data_offsets"][0];
      const std::size_t end = entry["data_offsets"][1];
      BOOST_TEST((entry["shape"] == nlohmann::json(tensor.shape)));
      const std::string data = bytes.substr(8 + length + begin, end - begin);
      BOOST_TEST(data.size() == tensor.data.size());
      if (!data.empty()) BOOST_TEST(std::memcmp(data.data(), tensor.data.data(), data.size()) == 0);
      total += data.size();
    }
    BOOST_TEST(total == bytes.size());
  }
}

BOOST_AUTO_TEST_CASE(large_and_many_tensors_are_written_whole) {
  // More than a chunk, and more tensors than are handed to the system at once.
  const Folder folder;
  Sample sample;
  Random random{7};
  sample.add("large", ElementKind::f32, {5, (1 << 18) - 7}, random);
  for (int i = 0; i < 700; ++i)
    sample.add("small." + std::to_string(i), ElementKind::u8, {random.below(50)}, random);
  write_file(folder / "a", sample.file);
  const CheckpointReader reader(folder / "a");
  reader.verify();
  for (const TensorToWrite& tensor : sample.file.tensors) {
    std::vector<std::byte> data(tensor.data.size());
    const StoredTensor& stored = *reader.find(tensor.name);
    reader.read(stored, 0, stored.count, data.data());
    BOOST_TEST(std::ranges::equal(data, tensor.data), tensor.name);
  }
}

BOOST_AUTO_TEST_CASE(a_file_that_is_cut_anywhere_is_rejected) {
  const Folder folder;
  Sample sample;
  Random random{1};
  for (int i = 0; i < 20; ++i)
    sample.add("layer" + std::to_string(i), ElementKind::f32, {16, 1 + random.below(9)}, random);
  write_file(folder / "a.safetensors", sample.file);
  const std::string bytes = content(folder / "a.safetensors");
  const auto check_cut = [&](std::size_t size) {
    const std::string path =
        put(folder / "cut.safetensors", std::string_view(bytes).substr(0, size));
    const std::string error = error_of([&] { read_whole(path); });
    BOOST_TEST(holds(error, "cut.safetensors"), "cut at " << size << ": " << error);
  };
  for (std::size_t size = 0; size < bytes.size(); size += 64) check_cut(size);
  for (std::size_t size = 0; size < 20; ++size) check_cut(size);
  check_cut(bytes.size() - 1);
  put(folder / "cut.safetensors", bytes + '\0');  // and one that is too long
  BOOST_TEST(holds(error_of([&] { read_whole(folder / "cut.safetensors"); }), "are there"));
}

BOOST_AUTO_TEST_CASE(a_thousand_flipped_bits_are_all_found_and_named) {
  const Folder folder;
  Sample sample;
  Random random{2};
  sample.file.facts.add("version", 1).add("world", 4);
  for (int i = 0; i < 6; ++i)
    sample.add("layer" + std::to_string(i) + ".weight", ElementKind::f32, {8, 8}, random);
  write_file(folder / "a.safetensors", sample.file);
  const std::string bytes = content(folder / "a.safetensors");
  const std::string path = folder / "flipped.safetensors";
  const SafetensorsFile whole(folder / "a.safetensors");
  const auto check_flip = [&](std::size_t bit) {
    std::string flipped = bytes;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    put(path, flipped);
    const std::string error = error_of([&] { read_whole(path); });
    BOOST_TEST(holds(error, "flipped.safetensors"), "bit " << bit << ": " << error);
    for (const TensorEntry& tensor : whole.tensors()) {
      if (bit / 8 >= tensor.begin && bit / 8 < tensor.begin + tensor.bytes)
        BOOST_TEST(holds(error, "the data of tensor '" + tensor.name + "'"), error);
    }
  };
  for (int i = 0; i < 1000; ++i) check_flip(random.below(8 * bytes.size()));
  // Every bit of the words by which the header is known to be lockstep's.
  const std::size_t begin = bytes.find("\"writer\"");
  for (std::size_t bit = 0; bit < 8 * 16; ++bit) check_flip(bit);
  for (std::size_t bit = 8 * begin; bit < 8 * (begin + 70); ++bit) check_flip(bit);
}

BOOST_AUTO_TEST_CASE(the_file_of_python_is_read) {
  // Whatever file lies there, by another parser.
  const char* const named = std::getenv("LOCKSTEP_REFERENCE");
  const std::string folder = named != nullptr ? named : LOCKSTEP_SOURCE_DIR "/tests/reference";
  const std::string path = folder + "/python.safetensors";
  const std::string bytes = content(path);
  BOOST_TEST_REQUIRE(bytes.size() > 8u);
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  const auto header = nlohmann::json::parse(bytes.substr(8, length));
  const CheckpointReader reader(path);
  reader.verify();
  BOOST_TEST(!reader.is_lockstep());
  BOOST_TEST(reader.tensors().size() == header.size() - header.count("__metadata__"));
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      for (const auto& [key, value] : entry.items())
        BOOST_TEST(*reader.main_file().metadata(key) == value.get<std::string>());
      continue;
    }
    const StoredTensor* const tensor = reader.find(name);
    BOOST_TEST_REQUIRE(tensor != nullptr);
    BOOST_TEST(tensor->element->name == entry["dtype"].get<std::string>());
    BOOST_TEST((tensor->shape == entry["shape"].get<std::vector<std::uint64_t>>()));
    const std::size_t begin = 8 + length + entry["data_offsets"][0].get<std::size_t>();
    const std::size_t end = 8 + length + entry["data_offsets"][1].get<std::size_t>();
    std::string data(end - begin, '\0');
    reader.read(*tensor, 0, tensor->count, reinterpret_cast<std::byte*>(data.data()));
    BOOST_TEST(data == bytes.substr(begin, end - begin));
  }
}

BOOST_AUTO_TEST_CASE(the_file_of_python_holds_what_python_wrote) {
  const CheckpointReader reader(LOCKSTEP_SOURCE_DIR "/tests/reference/python.safetensors");
  const auto check_wave = [&](const char* name, auto element, double k, double tolerance) {
    const StoredTensor& tensor = *reader.find(name);
    std::vector<decltype(element)> values(tensor.count);
    reader.read(tensor, 0, tensor.count, reinterpret_cast<std::byte*>(values.data()));
    for (std::size_t i = 0; i < values.size(); ++i)
      BOOST_TEST(std::abs(static_cast<double>(static_cast<float>(values[i])) -
                          std::sin(0.37 * static_cast<double>(i) + k)) <= tolerance);
    return tensor.shape;
  };
  using Shape = std::vector<std::uint64_t>;
  BOOST_TEST((check_wave("fc1.weight", float{}, 1, 1e-7) == Shape{4, 3}));
  BOOST_TEST((check_wave("fc1.bias", double{}, 2, 1e-7) == Shape{4}));
  BOOST_TEST((check_wave("half", BFloat16{}, 3, 4e-3) == Shape{5}));
  BOOST_TEST((reader.find("empty")->shape == Shape{0, 7}));
  std::int64_t step = 0;
  reader.read(*reader.find("step"), 0, 1, reinterpret_cast<std::byte*>(&step));
  BOOST_TEST(step == 1);
  BOOST_TEST(*reader.main_file().metadata("epoch") == "3");
}

BOOST_AUTO_TEST_CASE(what_cannot_be_written_is_said_and_leaves_nothing_behind) {
  const Folder folder;
  Sample sample;
  Random random{3};
  sample.add("w", ElementKind::f32, {4}, random);
  const auto write = [&](const std::string& path) {
    return error_of([&] { write_file(path, sample.file); });
  };
  const auto entries = [&] { return std::distance(fs::directory_iterator(folder.path), {}); };
  BOOST_TEST(
      write(folder / "no/such/a") ==
      "lockstep: checkpoint: '" + (folder / "no/such/a") +
          "' cannot be written: No such file or directory; make the folder first: mkdir -p '" +
          (folder / "no/such") + "'");
  put(folder / "file", "x");
  BOOST_TEST(holds(write(folder / "file/a"), "is no folder: name one"));
  fs::create_directory(folder / "taken");
  put(folder / "taken/inside", "x");
  BOOST_TEST(holds(write(folder / "taken"), "name a file, not a folder"));
  BOOST_TEST(holds(write(folder / std::string(300, 'a')), "give it a shorter name"));
  BOOST_TEST(entries() == 2);
  // Root may write everywhere.
  const bool is_root = ::geteuid() == 0;
  fs::create_directory(folder / "closed");
  fs::permissions(folder / "closed", fs::perms::owner_read | fs::perms::owner_exec);
  fs::permissions(folder.path, fs::perms::all);
  if (is_root && ::seteuid(65534) != 0) {
    say_skipped("a file in a folder without permission (no other user here)");
  } else {
    const std::string rejected = write(folder / "closed/a");
    if (is_root) BOOST_TEST_REQUIRE(::seteuid(0) == 0);
    BOOST_TEST(holds(rejected, "let this user write in"), rejected);
  }
  if (fs::exists("/proc/self")) BOOST_TEST(!write("/proc/a").empty());

  // A limit on sizes of files is met in the middle: what was there before stays.
  write_file(folder / "a", sample.file);
  const std::string before = content(folder / "a");
  sample.add("large", ElementKind::u8, {100'000}, random);
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{50'000, old.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  const std::string error = write(folder / "a");
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  BOOST_TEST(holds(error, "raise the limit on sizes of files"), error);
  BOOST_TEST(content(folder / "a") == before);
  fs::remove_all(folder / "closed");
  BOOST_TEST(entries() == 3);
}

BOOST_AUTO_TEST_CASE(errors_of_the_system_are_told_apart) {
  const auto says = [](int error, const char* part) {
    const std::string text = error_of([&] { fail_writing("checkpoint", "dir/a", error); });
    BOOST_TEST(holds(text, "'dir/a' cannot be written: "), text);
    BOOST_TEST(holds(text, part), text);
  };
  says(ENOSPC, "No space left on device; make room there");
  says(EDQUOT, "make room there");
  says(EROFS, "Read-only file system; mount 'dir' so that it may be written");
  says(ENOENT, "make the folder first: mkdir -p 'dir'");
  says(EACCES, "Permission denied; let this user write in 'dir'");
  says(EIO, "Input/output error; the disk or the network behind it fails");
  says(EMFILE, "ulimit -n");
}

BOOST_AUTO_TEST_CASE(what_would_not_be_read_is_not_written) {
  const Folder folder;
  Random random{4};
  const auto rejection = [&](const auto& change) {
    Sample sample;
    sample.add("w", ElementKind::f32, {4}, random);
    change(sample);
    return error_of([&] { write_file(folder / "a", sample.file); });
  };
  const auto name = [&](std::string name) {
    return rejection([&](Sample& sample) { sample.add(name, ElementKind::f32, {1}, random); });
  };
  BOOST_TEST(holds(name("w"), "the name 'w' twice"));
  BOOST_TEST(holds(name("__metadata__"), "'__metadata__' twice"));
  BOOST_TEST(holds(name("\xff"), "is not UTF-8"));
  BOOST_TEST(holds(rejection([](Sample& s) { s.file.tensors[0].shape = {5}; }),
                   "of shape [5] and type F32 has 16"));
  BOOST_TEST(holds(rejection([](Sample& s) { s.file.tensors[0].kind = ElementKind::unsupported; }),
                   "safetensors files do not have"));
  BOOST_TEST(holds(rejection([](Sample& s) { s.file.metadata = {{"format", "x"}}; }), "'format'"));
  BOOST_TEST(holds(rejection([](Sample& s) { s.file.facts.add("header", 1); }), "'header' twice"));
  BOOST_TEST(holds(rejection([](Sample& s) { s.file.facts.add("t", "\xff"); }), "is not UTF-8"));
  BOOST_TEST(
      holds(rejection([](Sample& s) { s.file.facts.add("a", 1).add("a", 2); }), "'a' twice"));
  BOOST_TEST(holds(rejection([](Sample& s) {
                     JsonLine deep;
                     for (int i = 0; i < 32; ++i) deep = JsonLine().add("a", JsonLine(deep));
                     s.file.facts.add("deep", deep);
                   }),
                   "too deep"));
  BOOST_TEST(fs::is_empty(folder.path));
  BOOST_TEST(name("v").empty());
}

BOOST_AUTO_TEST_SUITE_END()
