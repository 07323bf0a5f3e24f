// SPDX-License-Identifier: Apache-2.0
// Data in mapped files: NumPy's arrays, tokens, and what happens to a file while it is in use.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/data/mapped_file.hpp"
#include "lockstep/detail/data/npy.hpp"
#include "lockstep/detail/data/tokens.hpp"
#include "message_of.hpp"
#include "skipped.hpp"
#include "temporary_folder.hpp"

using namespace lockstep;
using namespace std::string_literals;

BOOST_AUTO_TEST_SUITE(data_files)

namespace {

/// A folder of files whose time of writing is long ago: whatever writes to them now is seen.
struct Folder : TemporaryFolder {
  std::string file(const std::string& name, const std::string& bytes) const {
    const std::string path = *this / name;
    std::ofstream(path, std::ios::binary) << bytes;
    const std::timespec long_ago[2] = {{.tv_sec = 1'000'000'000, .tv_nsec = 0},
                                       {.tv_sec = 1'000'000'000, .tv_nsec = 0}};
    BOOST_TEST_REQUIRE(::utimensat(AT_FDCWD, path.c_str(), long_ago, 0) == 0);
    return path;
  }
};

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

/// A file with this header, padded so that 64 divides where the elements begin.
std::string npy(std::string dict, const std::string& elements = "", char version = 1) {
  const std::size_t first = version == 1 ? 10 : 12;
  dict.resize((first + dict.size() + 1 + 63) / 64 * 64 - first - 1, ' ');
  dict += '\n';
  std::string out = "\x93NUMPY"s + version + '\0';
  for (std::size_t i = 0; i != first - 8; ++i) out += static_cast<char>(dict.size() >> (8 * i));
  return out + dict + elements;
}

std::string dict(const std::string& descr, const std::string& shape) {
  return "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }";
}

/// What numpy.save (2.4) writes for numpy.arange(6, dtype='<f4').reshape(2, 3).
const std::string by_numpy =
    "\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"s +
    std::string(58, ' ') +
    "\n\x00\x00\x00\x00\x00\x00\x80?\x00\x00\x00@\x00\x00@@\x00\x00\x80@\x00\x00\xa0@"s;

void expect(const std::string& words, const std::string& begin) {
  BOOST_TEST(words.substr(0, begin.size()) == begin);
  BOOST_TEST(words.find("; ") != std::string::npos, "there is no advice in " << words);
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_mapped_file_is_its_bytes) {
  const Folder folder;
  for (const std::optional<bool> reads_ahead :
       {std::optional<bool>(), std::optional(true), std::optional(false)}) {
    const std::string words = "0123456789" + std::string(5000, 'x');
    MappedFile file(folder.file("a", words), "test", reads_ahead);
    BOOST_TEST(text_of(file.bytes()) == words);
    file.require_intact();
    file.will_read(4990, 20);
    MappedFile other = std::move(file);
    BOOST_TEST(text_of(other.bytes()) == words);
    other = MappedFile(folder.file("empty", ""));
    BOOST_TEST(other.size() == 0u);
    other.require_intact();
  }
}

BOOST_AUTO_TEST_CASE(what_cannot_be_mapped_is_named) {
  const Folder folder;
  const auto words = [](const std::string& path) {
    return message_of([&] { const MappedFile file(path); });
  };
  const std::string missing = folder / "missing";
  expect(words(missing),
         "lockstep: MappedFile: '" + missing + "' cannot be read: No such file or directory; ");
  expect(words(folder.path),
         "lockstep: MappedFile: '" + folder.path + "' cannot be read: Is a directory; ");
  const std::string pipe = folder / "pipe";
  BOOST_TEST_REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  expect(words(pipe), "lockstep: MappedFile: '" + pipe + "' is no regular file; ");
}

BOOST_AUTO_TEST_CASE(threads_and_forked_processes_read_one_mapping) {
  const Folder folder;
  const MappedFile file(folder.file("a", std::string(100'000, 'x') + "y"));
  const auto reads = [&] {
    file.require_intact();
    std::size_t count = 0;
    for (const std::byte byte : file.bytes()) count += byte == std::byte{'x'};
    return count == 100'000;
  };
  bool read[2] = {};
  {
    std::thread first([&] { read[0] = reads(); });
    std::thread second([&] { read[1] = reads(); });
    first.join();
    second.join();
  }
  BOOST_TEST((read[0] && read[1]));
  const pid_t child = ::fork();
  if (child == 0) ::_exit(reads() ? 7 : 8);
  int status = 0;
  BOOST_TEST_REQUIRE(::waitpid(child, &status, 0) == child);
  BOOST_TEST(WEXITSTATUS(status) == 7);
  BOOST_TEST(reads());  // what the child has unmapped was its own
}

BOOST_AUTO_TEST_CASE(a_file_that_changes_while_it_is_in_use_is_named_and_a_replaced_one_goes_on) {
  const Folder folder;
  const std::string path = folder.file("a", by_numpy);
  const std::string labels = folder.file("labels", npy(dict("<i8", "(2,)"), std::string(16, '\0')));
  const auto made = [&] { return npy_dataset<float, std::int32_t>(path, labels); };
  const std::vector<std::size_t> both{1, 0};
  const auto load = [&](const auto& dataset) {
    LabelledBatch<float, std::int32_t> batch;
    dataset.load(both, batch);
    return batch.inputs;
  };
  const std::vector<float> rows{3, 4, 5, 0, 1, 2};

  auto dataset = made();
  folder.file("b", by_numpy.substr(0, 140) + "????????????");
  std::filesystem::rename(folder / "b", path);  // the old file is still there
  BOOST_TEST(load(dataset) == rows);
  std::filesystem::remove(path);
  BOOST_TEST(load(dataset) == rows);

  folder.file("a", by_numpy);
  dataset = made();
  std::filesystem::resize_file(path, 140);
  expect(message_of([&] { load(dataset); }),
         "lockstep: NpyFile: '" + path +
             "' has changed while it was in use: it had 152 bytes and has 140; ");
  BOOST_TEST(message_of([&] { made(); }) ==
             "lockstep: NpyFile: '" + path +
                 "', byte 140: the file ends; shape (2, 3) of float needs 24 bytes from byte 128 "
                 "on, and 12 are there; copy the file again, or save it again with numpy.save");

  folder.file("a", by_numpy);
  dataset = made();
  std::fstream(path, std::ios::binary | std::ios::in | std::ios::out).seekp(130) << "x";
  expect(message_of([&] { load(dataset); }),
         "lockstep: NpyFile: '" + path +
             "' has changed while it was in use: its 152 bytes were written to; ");

  folder.file("a", by_numpy);
  dataset = made();
  std::ofstream(labels, std::ios::binary | std::ios::app) << "x";
  expect(message_of([&] { load(dataset); }),
         "lockstep: NpyFile: '" + labels +
             "' has changed while it was in use: it had 144 bytes and has 145; ");
}

BOOST_AUTO_TEST_CASE(all_versions_and_spellings_of_a_header_are_read) {
  const Folder folder;
  const std::string four = bytes_of<float>({1, 2, 3, 4});
  const std::vector<std::size_t> shape{2, 2};
  for (const std::string& bytes : {
           npy(dict("<f4", "(2, 2)"), four),
           npy(dict("<f4", "(2, 2)"), four, 2),
           npy(dict("<f4", "(2, 2)"), four, 3),
           npy("{\"shape\":(2L,2L),\"descr\":\"<f4\",\"fortran_order\":False}", four),
           npy(" { 'fortran_order' : False , 'shape' : ( 2 , 2 , ) , 'descr' : '<f4' } ", four),
       }) {
    const NpyArray<float> array(folder.file("a", bytes));
    BOOST_TEST(array.shape() == shape);
    BOOST_TEST(array.size() == 2u);
    BOOST_TEST(array.width() == 2u);
    BOOST_TEST(array.row(1)[0] == 3.f);
  }
  const NpyArray<float> array(folder.file("a", by_numpy));
  BOOST_TEST((array.row(1)[0] == 3.f && array.row(1)[2] == 5.f && array.values().size() == 6u));
  std::span<const float> row;
  array.read(0, row);
  BOOST_TEST((row.data() == array.values().data() && row.size() == 3u));

  // No axis, one, and one without elements.
  const auto shape_of = [&](const std::string& bytes) {
    return NpyFile(folder.file("a", bytes)).shape();
  };
  BOOST_TEST(shape_of(npy(dict("<f4", "()"), "1234")).empty());
  BOOST_TEST(shape_of(npy(dict("<f4", "(1,)"), "1234")) == (std::vector<std::size_t>{1}));
  BOOST_TEST(shape_of(npy(dict("<f4", "(3, 0, 7)"))) == (std::vector<std::size_t>{3, 0, 7}));
}

BOOST_AUTO_TEST_CASE(every_element_type_is_written_as_numpy_names_it_and_read_again) {
  const Folder folder;
  const std::array<std::string, detail::element_kinds> names{
      "", "<f8", "<f4", "<f2", "<V2", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8"};
  const std::string path = folder / "a";
  for (std::size_t k = 1; k != names.size(); ++k) {
    const auto kind = static_cast<ElementKind>(k);
    std::string elements(6 * detail::element_size(kind), '\0');
    std::iota(elements.begin(), elements.end(), static_cast<char>(k));
    const std::vector<std::size_t> shape{3, 2};
    detail::write_npy_bytes(path, kind, std::as_bytes(std::span(elements)), shape);
    BOOST_TEST(contents(path) == npy(dict(names[k], "(3, 2)"), elements));
    const NpyFile file(path);
    BOOST_TEST((file.kind() == kind));
    BOOST_TEST(file.shape() == shape);
    BOOST_TEST(text_of(file.bytes()) == elements);
  }
  write_npy(path, std::vector<float>{0, 1, 2, 3, 4, 5}, {2, 3});
  BOOST_TEST(contents(path) == by_numpy);
  write_npy(path, std::array<Half, 2>{Half(1.f), Half(-2.f)});
  BOOST_TEST(NpyFile(path).shape() == (std::vector<std::size_t>{2}));
  BOOST_TEST(static_cast<float>(NpyArray<Half>(path).row(1)[0]) == -2.f);
  BOOST_TEST((NpyFile(folder.file("v", npy(dict("|V2", "(1,)"), "12"))).kind() ==
              ElementKind::bf16));  // as older versions write it
  expect(message_of([&] { NpyArray<double> file(path); }),
         "lockstep: NpyArray: the elements of '" + path +
             "' are half and are read as double; ask for half, or save it with a.astype('<f8')");
  expect(message_of([&] { NpyArray<Half>(path).row(2); }),
         "lockstep: NpyArray: there is no row 2 in '" + path + "', which has 2; ");
}

BOOST_AUTO_TEST_CASE(an_array_is_written_whole_or_not_at_all) {
  const Folder folder;
  const std::string path = folder.file("a", "what was there");
  const std::vector<float> values(6);
  expect(message_of([&] { write_npy(path, values, {2, 2}); }),
         "lockstep: write_npy: '" + path + "' would have shape (2, 2) and 6 elements; ");
  expect(message_of([&] { write_npy(folder / "none/a", values, {2, 3}); }),
         "lockstep: write_npy: '" + folder.path +
             "/none/a' cannot be written: No such file or directory; ");
  BOOST_TEST(contents(path) == "what was there");
  BOOST_TEST(folder.files().size() == 1u);
}

BOOST_AUTO_TEST_CASE(every_bad_array_is_named_with_the_byte_and_what_was_expected) {
  const Folder folder;
  const std::string good = npy(dict("<f4", "(2, 2)"), std::string(16, '\0'));
  const std::string path = folder / "a";
  const auto rejects = [&](const std::string& bytes, const std::string& problem) {
    folder.file("a", bytes);
    expect(message_of([&] { const NpyFile file(path); }),
           "lockstep: NpyFile: '" + path + "', byte " + problem);
  };
  rejects("", "0: \\x93NUMPY is expected; ");
  rejects("PK\3\4 an archive", "0: \\x93NUMPY is expected; ");
  rejects("\x93NUMPX..........", "0: \\x93NUMPY is expected; ");
  rejects(good.substr(0, 4), "0: \\x93NUMPY is expected; ");
  rejects(good.substr(0, 9), "9: the file ends within the first twelve bytes; ");
  rejects(npy("", "", 2).substr(0, 11), "11: the file ends within the first twelve bytes; ");
  rejects(std::string(good).replace(6, 2, "\4\0"s), "6: version 4.0 of the format; ");
  rejects(std::string(good).replace(6, 2, "\1\1"s), "6: version 1.1 of the format; ");
  rejects(good.substr(0, 100), "8: a header of 118 bytes, and 90 are there; ");
  rejects(std::string(npy("", "", 3)).replace(8, 4, "\xff\xff\xff\xff"),
          "8: a header of 4294967295 bytes, and 52 are there; ");
  rejects(good.substr(0, 140),
          "140: the file ends; shape (2, 2) of float needs 16 bytes from byte 128 on, and 12 are "
          "there; ");
  rejects(good + "x", "144: the end is expected; 1 bytes follow the 16 of shape (2, 2) of float; ");

  const auto header = [&](const std::string& words, const std::string& problem) {
    rejects(npy(words, std::string(16, '\0')), problem);
  };
  header("{}", "10: 'fortran_order' is expected in the header; ");
  header("{'fortran_order': False, 'shape': (4,)}", "10: 'descr' is expected in the header; ");
  header("{'fortran_order': False, 'descr': '<f4'}", "10: 'shape' is expected in the header; ");
  header("{'fortran_order': True}", "32: the elements are in Fortran order; ");
  header("{'fortran_order': 0}", "28: False or True is expected; ");
  header("{'fortran_order' False}", "27: ':' is expected; ");
  const auto descr = [&](const std::string& words, const std::string& problem) {
    header("{'fortran_order': False, 'descr': " + words + "}", problem);
  };
  descr("<f4", "44: a text in quotation marks is expected; ");
  descr("'>f4'", "45: '<f4' is expected instead of '>f4'; ");
  descr("'=f4'", "45: '<f4' is expected instead of '=f4'; ");
  descr("'|f4'", "45: '<f4' is expected instead of '|f4'; ");
  descr("'<c8'", "45: elements of type '<c8', which the library does not have; ");
  descr("'|b1'", "45: elements of type '|b1', which the library does not have; ");
  descr("'|O'", "45: elements of type '|O', which the library does not have; ");
  descr("''", "45: elements of type '', which the library does not have; ");
  descr("[('x', '<f4')]", "45: the elements are records of several fields; ");
  const auto shape = [&](const std::string& words, const std::string& problem) {
    header(dict("<f4", words), problem);
  };
  shape("4", "60: '(' is expected; ");
  shape("(2 2)", "63: ',' is expected; ");
  shape("(-2,)", "61: the extent of an axis is expected; ");
  shape("(2.0,)", "62: ',' is expected; ");
  shape("(18446744073709551616,)", "61: the extent of an axis is expected; ");
  header(dict("<f4", "(4294967296, 4294967296)"),
         "144: the file ends; shape (4294967296, 4294967296) of float needs 18446744073709551615 "
         "bytes ");
  rejects("\x93NUMPY\1\0"s + "\x37\0"s + dict("<f4", "()") + "1234",
          "65: the elements begin here, at no multiple of their 4 bytes; ");
}

BOOST_AUTO_TEST_CASE(pairs_of_files_are_samples) {
  const Folder folder;
  const std::string inputs = folder.file("x", by_numpy);
  const auto labels = [&](const std::string& descr, const std::string& shape,
                          const std::string& elements) {
    return folder.file("y", npy(dict(descr, shape), elements));
  };
  const std::string int64s = bytes_of<std::int64_t>({-7, 9});
  for (const std::string& path : {labels("<i8", "(2, 1)", int64s), labels("<i8", "(2,)", int64s),
                                  labels("|i1", "(2,)", "\xf9\x09")}) {
    const auto dataset = npy_dataset<float, std::int32_t>(inputs, path);
    BOOST_TEST(dataset.size() == 2u);
    BOOST_TEST(dataset.width() == 3u);
    LabelledBatch<float, std::int32_t> batch;
    dataset.load(std::vector<std::size_t>{1, 0, 1}, batch);
    BOOST_TEST(batch.inputs == (std::vector<float>{3, 4, 5, 0, 1, 2, 3, 4, 5}));
    BOOST_TEST(batch.labels == (std::vector<std::int32_t>{9, -7, 9}));
    BOOST_TEST(batch.weights == (std::vector<float>{1, 1, 1}));
    LabelledSample<float, std::int32_t> sample;
    dataset.read(1, sample);
    BOOST_TEST((sample.label == 9 && sample.inputs.size() == 3u && sample.inputs[2] == 5.f));
    expect(message_of([&] { dataset.load(std::vector<std::size_t>{0, 2}, batch); }),
           "lockstep: NpyArray: there is no row 2 in '" + inputs + "', which has 2; ");
  }

  // A label that the type asked for does not hold.
  LabelledBatch<float, std::int32_t> batch;
  const std::string path =
      labels("<i8", "(2,)", bytes_of<std::int64_t>({1, std::int64_t{1} << 40}));
  const auto wide = npy_dataset<float, std::int32_t>(inputs, path);
  wide.load(std::vector<std::size_t>{0}, batch);
  expect(message_of([&] { wide.load(std::vector<std::size_t>{0, 1}, batch); }),
         "lockstep: npy_dataset: '" + path +
             "', byte 136: the label of sample 1 is 1099511627776, which int32 does not hold; ");
  labels("<u8", "(2,)", bytes_of<std::uint64_t>({1, ~std::uint64_t{0}}));
  const auto wider = npy_dataset<float, std::int32_t>(inputs, path);
  expect(message_of([&] { wider.load(std::vector<std::size_t>{1}, batch); }),
         "lockstep: npy_dataset: '" + path +
             "', byte 136: the label of sample 1 is above 9223372036854775807, which int32 does ");

  // Files that do not belong together.
  const auto made = [&](const std::string& x) {
    return message_of([&] { npy_dataset<float, std::int32_t>(x, path); });
  };
  labels("<f4", "(2,)", bytes_of<float>({1, 2}));
  expect(made(inputs), "lockstep: NpyArray: the elements of '" + path +
                           "' are float and are to be labels of int32; ");
  labels("<i8", "(1,)", bytes_of<std::int64_t>({1}));
  expect(made(inputs),
         "lockstep: npy_dataset: '" + inputs + "' has 2 rows and '" + path + "' 1 labels; ");
  labels("<i8", "(2, 2)", bytes_of<std::int64_t>({1, 2, 3, 4}));
  expect(made(inputs), "lockstep: npy_dataset: the labels in '" + path + "' have shape (2, 2); ");
  labels("<i8", "(2,)", int64s);
  const std::string empty = folder.file("z", npy(dict("<f4", "(2, 0)")));
  expect(made(empty),
         "lockstep: npy_dataset: '" + empty + "' has shape (2, 0), which is no number of rows; ");
}

BOOST_AUTO_TEST_CASE(a_set_larger_than_memory_is_opened_at_once_and_read_where_it_is_drawn) {
  const Folder folder;
  const std::size_t width = 1024;
  const std::size_t rows = 2 * static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) *
                           static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) /
                           (width * sizeof(float));
  const std::string begin =
      npy(dict("<f4", "(" + std::to_string(rows) + ", " + std::to_string(width) + ")"));
  const std::string path = folder.file("x", begin);
  const int file = ::open(path.c_str(), O_WRONLY);  // a file of holes, but for its last row
  const std::vector<float> last(width, 5.f);
  const auto end = static_cast<off_t>(begin.size() + rows * width * sizeof(float));
  const bool has_holes =
      ::ftruncate(file, end) == 0 && ::pwrite(file, last.data(), width * sizeof(float),
                                              end - static_cast<off_t>(width * sizeof(float))) > 0;
  ::close(file);
  if (!has_holes) {
    say_skipped("rows of an array larger than memory (this file system has no such files)");
    return;
  }
  const NpyArray<float> array(path);
  BOOST_TEST(array.size() == rows);
  BOOST_TEST(array.file().file().reads_at_random());
  const std::vector<std::size_t> drawn{rows - 1, 0, rows / 2};
  array.prepare(drawn);
  BOOST_TEST(array.row(rows - 1)[width - 1] == 5.f);
  BOOST_TEST(array.row(rows / 2)[0] == 0.f);
}

BOOST_AUTO_TEST_CASE(tokens_are_windows_that_overlap_by_one) {
  const Folder folder;
  std::vector<std::uint16_t> tokens(22);
  std::iota(tokens.begin(), tokens.end(), std::uint16_t{100});
  const std::string path = folder.file("tokens", bytes_of(tokens));
  const TokenDataset<std::uint16_t> dataset(path, 5);
  BOOST_TEST(dataset.size() == 4u);  // 22 tokens: the last begins at 15 and ends at 20
  BOOST_TEST(dataset.length() == 5u);
  TokenBatch<std::uint16_t> batch;
  dataset.load(std::vector<std::size_t>{3, 0}, batch);
  BOOST_TEST(batch.size() == 2u);
  using Tokens = std::vector<std::uint16_t>;
  const auto copy = [](std::span<const std::uint16_t> part) {
    return Tokens(part.begin(), part.end());
  };
  BOOST_TEST(copy(batch.inputs(0)) == (Tokens{115, 116, 117, 118, 119}));
  BOOST_TEST(copy(batch.targets(0)) == (Tokens{116, 117, 118, 119, 120}));
  BOOST_TEST(copy(batch.inputs(1)) == (Tokens{100, 101, 102, 103, 104}));
  BOOST_TEST(batch.weights == (std::vector<float>{1, 1}));
  TokenBatch<std::uint16_t> part;
  batch.slice(1, 1, part);
  BOOST_TEST(part.tokens == (Tokens{100, 101, 102, 103, 104, 105}));
  std::span<const std::uint16_t> window;
  dataset.read(1, window);
  BOOST_TEST(copy(window) == (Tokens{105, 106, 107, 108, 109, 110}));

  BOOST_TEST((TokenDataset<std::uint16_t>(path, 21).size()) == 1u);
  BOOST_TEST((TokenDataset<std::uint16_t>(path, 5, {.stride = 1}).size()) == 17u);
  BOOST_TEST((TokenDataset<std::uint16_t>(path, 5, {.stride = 100}).size()) == 1u);
  const TokenDataset<std::uint16_t> behind(path, 5, {.stride = 4, .header_bytes = 6});
  BOOST_TEST(behind.size() == 4u);
  behind.load(std::vector<std::size_t>{1}, batch);
  BOOST_TEST(batch.tokens == (Tokens{107, 108, 109, 110, 111, 112}));

  // An array of NumPy's is known by how it begins.
  const std::string array = folder.file("array", npy(dict("<u2", "(22,)"), bytes_of(tokens)));
  const TokenDataset<std::uint16_t> saved(array, 5);
  BOOST_TEST(saved.size() == 4u);
  saved.load(std::vector<std::size_t>{3}, batch);
  BOOST_TEST(batch.inputs(0)[0] == 115);

  // The windows of several files follow each other.
  const std::string other = folder.file("other", bytes_of<std::uint16_t>({1, 2, 3, 4, 5, 6}));
  const std::vector<std::string> paths{path, other, array};
  const TokenDataset<std::uint16_t> all(paths, 5);
  BOOST_TEST(all.size() == 9u);
  all.load(std::vector<std::size_t>{4, 3, 5, 8}, batch);
  const std::vector<std::uint16_t> firsts{batch.row(0)[0], batch.row(1)[0], batch.row(2)[0],
                                          batch.row(3)[0]};
  BOOST_TEST(firsts == (Tokens{1, 115, 100, 115}));
  std::filesystem::resize_file(other, 10);
  all.load(std::vector<std::size_t>{3, 5}, batch);  // none of the changed file's
  expect(message_of([&] { all.load(std::vector<std::size_t>{3, 4}, batch); }),
         "lockstep: TokenDataset: '" + other +
             "' has changed while it was in use: it had 12 bytes and has 10; ");
  expect(
      message_of([&] { all.load(std::vector<std::size_t>{9}, batch); }),
      "lockstep: TokenDataset: there is no window 9: '" + path + "' and those behind it have 9; ");
}

BOOST_AUTO_TEST_CASE(bad_token_files_are_named) {
  const Folder folder;
  const std::string path = folder.file("tokens", bytes_of<std::uint16_t>({1, 2, 3, 50000, 5}));
  const auto made = [&](std::size_t length, const TokenOptions& options = {}) {
    return message_of([&] { const TokenDataset<std::uint16_t> dataset(path, length, options); });
  };
  const std::string begin = "lockstep: TokenDataset: '" + path + "'";
  expect(made(0), "lockstep: TokenDataset: windows of no tokens; ");
  expect(made(5), begin + " has 5 tokens, and a window needs 5 and one more; ");
  expect(made(2, {.header_bytes = 3}), begin + ": tokens of 2 bytes cannot begin at byte 3; ");
  expect(made(2, {.header_bytes = 12}),
         begin + " ends at byte 10, and its header should have 12 bytes; ");
  const TokenDataset<std::uint16_t> dataset(path, 2, {.vocabulary = 50000});
  TokenBatch<std::uint16_t> batch;
  dataset.load(std::vector<std::size_t>{0}, batch);
  expect(message_of([&] { dataset.load(std::vector<std::size_t>{0, 1}, batch); }),
         begin + ", byte 6: token 50000 in a vocabulary of 50000; ");
  expect(message_of([&] { dataset.load(std::vector<std::size_t>{2}, batch); }),
         "lockstep: TokenDataset: there is no window 2: '" + path + "' has 2; ");
  std::filesystem::resize_file(path, 6);
  expect(message_of([&] { dataset.load(std::vector<std::size_t>{0}, batch); }),
         begin + " has changed while it was in use: it had 10 bytes and has 6; ");
  folder.file("tokens", "12345");
  expect(made(1), begin + " ends at byte 5, within a token: from byte 0 on, each has 2 bytes; ");
  folder.file("tokens", npy(dict("<u4", "(4,)"), std::string(16, '\0')));
  expect(made(1), "lockstep: NpyArray: the elements of '" + path +
                      "' are uint32 and are read as tokens of uint16; ");
  folder.file("tokens", npy(dict("<u2", "(2, 2)"), std::string(8, '\0')));
  expect(made(1), begin + " has shape (2, 2); ");
}

BOOST_AUTO_TEST_CASE(numpy_reads_what_is_written_and_its_files_are_read_where_it_is_installed) {
  const Folder folder;
  std::string python;
  for (const std::string& candidate :
       {std::string(std::getenv("LOCKSTEP_TORCH") ? std::getenv("LOCKSTEP_TORCH") : "") +
            "/python3",
        std::string(std::getenv("HOME") ? std::getenv("HOME") : "") +
            "/.cache/lockstep/torch/bin/python3",
        "python3"s}) {
    if (python.empty() && std::system((candidate + " -c 'import numpy' 2>/dev/null").c_str()) == 0)
      python = candidate;
  }
  if (python.empty()) {
    say_skipped("what numpy reads and writes (no numpy here)");
    return;
  }
  const std::string numpy = "cd '" + folder.path + "' && " + python +
                            " -c \"import numpy as n\n"
                            "k = 'f8 f4 f2 i1 i2 i4 i8 u1 u2 u4 u8'.split()\n";
  BOOST_TEST_REQUIRE(
      std::system((numpy + "for t in k: n.save(t, n.arange(12).reshape(3, 4).astype(t))\n"
                           "n.save('F', n.asfortranarray(n.ones((3, 4))))\n"
                           "n.save('B', n.arange(3).astype('>i4'))\n"
                           "n.savez('Z', n.arange(3))\"")
                      .c_str()) == 0);
  for (const ElementKind kind :
       {ElementKind::f64, ElementKind::f32, ElementKind::f16, ElementKind::i8, ElementKind::i16,
        ElementKind::i32, ElementKind::i64, ElementKind::u8, ElementKind::u16, ElementKind::u32,
        ElementKind::u64}) {
    const std::string name(detail::npy_type(kind));
    const NpyFile file(folder / (name + ".npy"));
    BOOST_TEST((file.kind() == kind));
    BOOST_TEST(file.shape() == (std::vector<std::size_t>{3, 4}));
    detail::write_npy_bytes(folder / (name + ".copy.npy"), kind, file.bytes(), file.shape());
  }
  BOOST_TEST((NpyArray<float>(folder / "f4.npy").row(2)[3] == 11.f));
  BOOST_TEST((NpyArray<std::uint64_t>(folder / "u8.npy").row(1)[0] == 4u));
  BOOST_TEST(message_of([&] { NpyFile(folder / "F.npy"); }).find("in Fortran order; ") !=
             std::string::npos);
  BOOST_TEST(message_of([&] { NpyFile(folder / "B.npy"); }).find("expected instead of '>i4'; ") !=
             std::string::npos);
  BOOST_TEST(message_of([&] { NpyFile(folder / "Z.npz"); }).find("unpack it first") !=
             std::string::npos);
  BOOST_TEST(
      std::system((numpy + "for t in k:\n"
                           "  a = n.load(t + '.copy.npy')\n"
                           "  assert a.dtype == t and (a == n.arange(12).reshape(3, 4)).all()\n"
                           "  assert open(t + '.npy', 'rb').read() == "
                           "open(t + '.copy.npy', 'rb').read()\"")
                      .c_str()) == 0);
}

BOOST_AUTO_TEST_SUITE_END()
