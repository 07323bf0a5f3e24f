// SPDX-License-Identifier: Apache-2.0
#include "fashion_mnist.hpp"

#include <zlib.h>

#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/detail/data/pipeline.hpp"
#include "skipped.hpp"
#include "temporary_folder.hpp"

using namespace lockstep;
using namespace std::string_literals;

BOOST_AUTO_TEST_SUITE(data_idx)

namespace {

/// A folder that files are written into, plainly or compressed.
struct Folder : TemporaryFolder {
  std::string plain(const std::string& name, const std::string& bytes) const {
    std::ofstream(*this / name, std::ios::binary) << bytes;
    return *this / name;
  }
  std::string gzip(const std::string& name, const std::string& bytes) const {
    const gzFile file = gzopen((*this / name).c_str(), "wb");
    gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size()));
    gzclose(file);
    return *this / name;
  }
};

/// Sets an environment variable for as long as it lives.
class Environment {
 public:
  Environment(const char* name, const std::string& value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    ::setenv(name, value.c_str(), 1);
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
  ~Environment() { old_ ? ::setenv(name_, old_->c_str(), 1) : ::unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> old_;
};

std::string word(std::size_t n) {
  return {static_cast<char>(n >> 24), static_cast<char>(n >> 16), static_cast<char>(n >> 8),
          static_cast<char>(n)};
}

/// Three images of 2x2 and their labels.
const std::string images = "\0\0\x08\x03"s + word(3) + word(2) + word(2) +
                           "\x00\xff\x33\x66\x01\x02\x03\x04\x05\x06\x07\x08"s;
const std::string labels = "\0\0\x08\x01"s + word(3) + "\x02\x00\x09"s;

std::string contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void expect_error(auto make, const std::string& problem) {
  BOOST_CHECK_EXCEPTION(make(), Error, [&](const Error& error) {
    BOOST_TEST(error.problem() == problem);
    return !error.advice().empty();
  });
}

}  // namespace

BOOST_AUTO_TEST_CASE(plain_and_compressed_files_read_alike) {
  const Folder folder;
  for (const std::string& path : {folder.plain("a", images), folder.gzip("b.gz", images)}) {
    const IdxArray array = read_idx(path);
    BOOST_TEST(array.extents == (std::vector<std::size_t>{3, 2, 2}));
    BOOST_TEST(array.bytes.size() == 12u);
    BOOST_TEST(array.bytes.is_mapped() == path.ends_with("a"));
    BOOST_TEST(array.bytes[1] == 255);
    BOOST_TEST(array.bytes[11] == 8);
  }
}

BOOST_AUTO_TEST_CASE(every_corruption_is_named) {
  const Folder folder;
  const auto expect = [&](const std::string& bytes, const std::string& problem) {
    for (const std::string& path : {folder.plain("file", bytes), folder.gzip("file.gz", bytes)})
      expect_error([&] { return read_idx(path, 3); }, "'" + path + "', byte " + problem);
  };
  expect("", "0: it ends within its first four bytes");
  expect("\0\0\x08"s, "3: it ends within its first four bytes");
  expect("\x89PNG....", "0: it does not begin with two zero bytes");
  expect("\0\0\x0d\x03"s, "2: its element type is number 13");
  expect(labels, "3: it has 1 dimensions instead of 3");
  expect(images.substr(0, 10), "10: it ends within its header");
  expect(images.substr(0, images.size() - 1),
         "27: it ends within the 12 bytes that its header promises");
  expect(images + "x", "28: bytes follow the 12 that its header promises");
  expect("\0\0\x08\x03"s + word(0xffffffff) + word(0xffffffff) + word(0xffffffff) + "x",
         "17: it ends within the 18446744073709551615 bytes that its header promises");
}

BOOST_AUTO_TEST_CASE(a_damaged_gzip_stream_is_named) {
  const Folder folder;
  const std::string good = contents(folder.gzip("good.gz", images));
  const std::string path = folder / "bad.gz";
  const auto expect = [&](const std::string& bytes, const std::string& problem) {
    folder.plain("bad.gz", bytes);
    BOOST_CHECK_EXCEPTION(read_idx(path), Error, [&](const Error& error) {
      return error.problem().starts_with("'" + path + "', byte ") &&
             error.problem().find(": the gzip stream " + problem) != std::string::npos;
    });
  };
  expect(good.substr(0, good.size() - 12), "ends early");
  std::string flipped = good;
  flipped[flipped.size() - 7] ^= 1;  // the checksum
  expect(flipped, "is damaged: ");
}

BOOST_AUTO_TEST_CASE(a_missing_file_and_a_folder_are_named) {
  const Folder folder;
  const std::string path = folder / "nothing";
  expect_error([&] { return read_idx(path); },
               "'" + path + "' cannot be read: No such file or directory");
  const std::string itself = folder / ".";
  expect_error([&] { return read_idx(itself); }, "'" + itself + "' cannot be read: Is a directory");
}

BOOST_AUTO_TEST_CASE(bytes_become_floats_when_a_batch_is_loaded) {
  const Folder folder;
  const IdxFiles files{folder.plain("images", images), folder.gzip("labels.gz", labels)};
  const ImageDataset dataset = read_idx_dataset(files);
  BOOST_TEST(dataset.size() == 3u);
  BOOST_TEST(dataset.width() == 4u);
  ImageDataset::batch_type batch;
  const std::vector<std::size_t> indices{2, 0};
  dataset.load(indices, batch);
  BOOST_TEST(batch.labels == (std::vector<std::int32_t>{9, 2}));
  BOOST_TEST(batch.row(1)[1] == 1.f);
  BOOST_TEST(batch.row(1)[2] == 0.2f);
  BOOST_TEST(batch.row(0)[3] == 8.f / 255.f);

  const ImageDataset normalized =
      read_idx_dataset(files, {.normalization = {.mean = 0.5f, .deviation = 0.25f}});
  normalized.load(indices, batch);
  BOOST_TEST(batch.row(1)[0] == -2.f);
  BOOST_TEST(batch.row(1)[1] == 2.f);
}

BOOST_AUTO_TEST_CASE(a_plain_file_is_read_where_it_is_mapped_and_may_not_change_meanwhile) {
  const Folder folder;
  const IdxFiles files{folder.plain("images", images), folder.gzip("labels.gz", labels)};
  const ImageDataset dataset = read_idx_dataset(files);
  ImageDataset::batch_type batch;
  const std::vector<std::size_t> one{1};
  std::filesystem::rename(files.labels, folder / "other");  // it was unpacked
  folder.plain("new", images.substr(0, 20));
  std::filesystem::rename(folder / "new", files.images);  // the old one is still mapped
  dataset.load(one, batch);
  BOOST_TEST(batch.row(0)[3] == 4.f / 255.f);
  expect_error([&] { dataset.load(std::vector<std::size_t>{0, 3}, batch); },
               "there is no sample 3: there are 3");

  folder.plain("images", images);
  const ImageDataset cut = read_idx_dataset({files.images, folder / "other"});
  std::filesystem::resize_file(files.images, 20);
  expect_error(
      [&] { cut.load(one, batch); },
      "'" + files.images + "' has changed while it was in use: it had 28 bytes and has 20");
  // A pipeline reads sample by sample, and looks at the file once for a batch.
  const auto doubled = cut | map([](auto sample) {
                         for (float& x : sample.inputs) x *= 2;
                         return sample;
                       });
  expect_error(
      [&] { doubled.load(one, batch); },
      "'" + files.images + "' has changed while it was in use: it had 28 bytes and has 20");
}

BOOST_AUTO_TEST_CASE(files_that_do_not_belong_together_are_rejected) {
  const Folder folder;
  const std::string image_file = folder.plain("images", images);
  const std::string fewer = folder.plain("fewer", "\0\0\x08\x01"s + word(2) + "\x02\x00"s);
  expect_error([&] { return read_idx_dataset({image_file, fewer}); },
               image_file + " has 3 images and " + fewer + " 2 labels");
  const std::string label_file = folder.plain("labels", labels);
  BOOST_CHECK_EXCEPTION(read_idx_dataset({image_file, label_file}, {.classes = 9}), Error,
                        [&](const Error& error) {
                          BOOST_TEST(error.operation() == label_file);
                          return error.problem() == "label 9 of sample 2, with 9 classes";
                        });
}

BOOST_AUTO_TEST_CASE(splits_are_found_in_the_folder_of_the_environment) {
  const Folder folder;
  const Environment environment("LOCKSTEP_DATA", folder / "");
  folder.plain("train-images-idx3-ubyte", images);
  folder.gzip("train-labels-idx1-ubyte.gz", labels);
  BOOST_TEST(idx_dataset("train").size() == 3u);
  BOOST_TEST(fashion_mnist("train").size() == 3u);
  BOOST_CHECK_EXCEPTION(idx_dataset("test"), Error, [&](const Error& error) {
    return error.problem().starts_with("no t10k-images-idx3-ubyte");
  });
  BOOST_CHECK_THROW(idx_dataset("validation"), Error);
  folder.plain("train-images-idx3-ubyte", images + "x");
  BOOST_CHECK_THROW(fashion_mnist("train"), Error);                              // damaged
  BOOST_CHECK_EXCEPTION(fashion_mnist("test"), Error, [&](const Error& error) {  // never generated
    return error.problem().find(folder / "") != std::string::npos &&
           error.advice().find("dataset-fashion-mnist") != std::string::npos;
  });
  BOOST_TEST(fashion_mnist("test", "generated").size() == 10'000u);
}

BOOST_AUTO_TEST_CASE(fashion_mnist_is_what_it_should_be_where_it_is_installed) {
  if (std::getenv("LOCKSTEP_DATA") != nullptr || !find_idx_files("test", idx_folder())) {
    say_skipped("Fashion-MNIST itself (dataset-fashion-mnist is not installed here)");
    return;
  }
  const ImageDataset dataset = fashion_mnist("test");
  BOOST_TEST(dataset.size() == 10'000u);
  BOOST_TEST(dataset.width() == 784u);
  ImageDataset::batch_type batch;
  dataset.load(std::vector<std::size_t>{0, 1, 2}, batch);
  BOOST_TEST(batch.labels == (std::vector<std::int32_t>{9, 2, 1}));
}

BOOST_AUTO_TEST_SUITE_END()
