// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Fashion-MNIST, and other sets in IDX files, plain or compressed with gzip. Programs that
/// include it link zlib (`-lz`).

#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "image_dataset.hpp"
#include "lockstep/data.hpp"
#include "lockstep/detail/core/bytes.hpp"

/// An array of bytes, row-major.
struct IdxArray {
  std::vector<std::size_t> extents;
  SharedBytes bytes;
};

/// What can be wrong with any IDX file, and where: `place` is a byte of what gzip has packed.
struct IdxFault {
  const std::string& path;

  [[noreturn, gnu::cold]] void at(std::size_t place,
                                  std::initializer_list<lockstep::detail::TextPart> problem,
                                  std::string_view advice = copy_again) const {
    lockstep::detail::fail(
        "read_idx", {"'", path, "', byte ", place, ": ", lockstep::detail::text(problem)}, advice);
  }

  static constexpr const char* copy_again = "copy or download the file again";
};

/// A file that zlib reads from front to back and unpacks.
class IdxStream {
 public:
  explicit IdxStream(const std::string& path) : fault_{path} {
    errno = 0;
    file_ = gzopen(path.c_str(), "rb");
    if (file_ == nullptr)
      fault_.at(0, {"it cannot be opened: ", lockstep::detail::error_text(errno)},
                "check the path");
    gzbuffer(file_, 256_KiB);
  }
  IdxStream(const IdxStream&) = delete;
  IdxStream& operator=(const IdxStream&) = delete;
  ~IdxStream() { gzclose(file_); }

  /// Reads as much of `out` as there is.
  std::size_t read(std::span<std::uint8_t> out) {
    const int count = gzread(file_, out.data(), static_cast<unsigned>(out.size()));
    int code = Z_OK;
    const char* const words = gzerror(file_, &code);
    const auto place = static_cast<std::size_t>(std::max<z_off_t>(gztell(file_), 0));
    if (code == Z_BUF_ERROR) fault_.at(place, {"the gzip stream ends early"});
    if (code == Z_ERRNO)
      fault_.at(place, {"reading failed: ", lockstep::detail::error_text(errno)});
    if (count < 0 || code != Z_OK) fault_.at(place, {"the gzip stream is damaged: ", words});
    return static_cast<std::size_t>(count);
  }

  /// The `bytes` that follow, and nothing behind them. They are read in steps: a damaged header may
  /// promise more than memory holds.
  SharedBytes rest(std::size_t begin, std::size_t bytes) {
    std::vector<std::uint8_t> all;
    while (all.size() < bytes) {
      const std::size_t done = all.size();
      all.resize(done + std::min(bytes - done, 16_MiB));
      const std::size_t count = read(std::span(all).subspan(done));
      if (count != all.size() - done)
        fault_.at(begin + done + count,
                  {"it ends within the ", bytes, " bytes that its header promises"});
    }
    std::array<std::uint8_t, 1> more{};
    if (read(more) != 0)
      fault_.at(begin + bytes, {"bytes follow the ", bytes, " that its header promises"});
    return all;
  }

 private:
  IdxFault fault_;
  gzFile file_ = nullptr;
};

/// A mapped file.
class IdxMap {
 public:
  IdxMap(const std::string& path, std::shared_ptr<const MappedFile> file)
      : fault_{path}, file_(std::move(file)) {}

  std::size_t read(std::span<std::uint8_t> out) {
    const auto left = file_->bytes().subspan(place_);
    const std::size_t count = std::min(left.size(), out.size());
    std::copy_n(reinterpret_cast<const std::uint8_t*>(left.data()), count, out.data());
    place_ += count;
    return count;
  }

  SharedBytes rest(std::size_t begin, std::size_t bytes) const {
    const std::size_t has = file_->size() - begin;
    if (has < bytes)
      fault_.at(begin + has, {"it ends within the ", bytes, " bytes that its header promises"});
    if (has > bytes)
      fault_.at(begin + bytes, {"bytes follow the ", bytes, " that its header promises"});
    return {file_, begin};
  }

 private:
  IdxFault fault_;
  std::shared_ptr<const MappedFile> file_;
  std::size_t place_ = 0;
};

inline std::size_t big_endian(const std::array<std::uint8_t, 4>& bytes) {
  return std::size_t{bytes[0]} << 24 | std::size_t{bytes[1]} << 16 | std::size_t{bytes[2]} << 8 |
         std::size_t{bytes[3]};
}

template <class File>
IdxArray read_idx_from(File&& file, const std::string& path,
                       std::optional<std::size_t> dimensions) {
  const IdxFault fault{path};
  std::size_t place = 0;
  std::array<std::uint8_t, 4> word{};
  const auto next = [&](std::string_view what) {
    const std::size_t count = file.read(word);
    if (count != word.size()) fault.at(place + count, {"it ends within ", what});
    place += word.size();
  };
  next("its first four bytes");
  if (word[0] != 0 || word[1] != 0)
    fault.at(0, {"it does not begin with two zero bytes"}, "give an IDX file, plain or gzip");
  if (constexpr std::uint8_t unsigned_bytes = 0x08; word[2] != unsigned_bytes)
    fault.at(2, {"its element type is number ", word[2]},
             "give a file of unsigned bytes, which are number 8");
  if (dimensions && word[3] != *dimensions)
    fault.at(3, {"it has ", word[3], " dimensions instead of ", *dimensions},
             "images have three (count, rows, columns) and labels one; are the two mixed up?");

  IdxArray array;
  array.extents.resize(word[3]);
  std::size_t bytes = 1;
  for (std::size_t& extent : array.extents) {
    next("its header");
    extent = big_endian(word);
    bytes = lockstep::detail::saturating_product(bytes, extent);
  }
  array.bytes = file.rest(place, bytes);
  return array;
}

/// Reads an IDX file of unsigned bytes, and checks its number of dimensions if one is given. A
/// plain file is mapped, and read when its bytes are; a compressed one is unpacked into memory.
inline IdxArray read_idx(const std::string& path,
                         std::optional<std::size_t> dimensions = std::nullopt) {
  struct stat status{};
  const bool is_pipe =
      ::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode);
  if (!is_pipe) {
    auto file = std::make_shared<const MappedFile>(path, "read_idx");
    const std::span<const std::byte> bytes = file->bytes();
    const bool is_gzip =
        bytes.size() >= 2 && bytes[0] == std::byte{0x1f} && bytes[1] == std::byte{0x8b};
    if (!is_gzip) return read_idx_from(IdxMap(path, std::move(file)), path, dimensions);
  }
  return read_idx_from(IdxStream(path), path, dimensions);
}

/// How many classes an IDX data set has, and how its bytes become floats.
struct IdxOptions {
  std::size_t classes = 10;
  Normalization normalization{};
  std::string folder{};  ///< without one: $LOCKSTEP_DATA, else where Debian's package has it
};

/// The paths of images and labels.
struct IdxFiles {
  std::string images;
  std::string labels;
};

/// Reads the two files and checks that they belong together.
inline ImageDataset read_idx_dataset(const IdxFiles& files, const IdxOptions& options = {}) {
  IdxArray images = read_idx(files.images, 3);
  IdxArray labels = read_idx(files.labels, 1);
  if (images.extents[0] != labels.extents[0]) {
    lockstep::detail::fail("read_idx_dataset",
                           {files.images, " has ", images.extents[0], " images and ", files.labels,
                            " ", labels.extents[0], " labels"},
                           "give files of the same set");
  }
  return {std::move(images.bytes), std::move(labels.bytes), options.classes, options.normalization,
          files.labels};
}

/// $LOCKSTEP_DATA, else where Debian's dataset-fashion-mnist is.
inline std::string idx_folder() {
  const char* const folder = std::getenv("LOCKSTEP_DATA");
  return folder != nullptr ? folder : "/usr/share/datasets/fashion-mnist";
}

/// The files of a split, "train" or "test", under the names that MNIST gave them; nothing if one of
/// them is missing.
inline std::optional<IdxFiles> find_idx_files(const std::string& split, const std::string& folder) {
  if (split != "train" && split != "test") {
    lockstep::detail::fail("idx_dataset", {"there is no split '", split, "'"},
                           "say \"train\" or \"test\"");
  }
  const auto find = [&](const char* name) -> std::string {
    for (const char* ending : {"", ".gz"}) {
      const char* const stem = split == "train" ? "/train" : "/t10k";
      std::string path = lockstep::detail::text({folder, stem, name, ending});
      if (::access(path.c_str(), F_OK) == 0) return path;
    }
    return {};
  };
  IdxFiles files{find("-images-idx3-ubyte"), find("-labels-idx1-ubyte")};
  if (files.images.empty() || files.labels.empty()) return std::nullopt;
  return files;
}

/// The split of MNIST, Fashion-MNIST or another set in their format.
inline ImageDataset idx_dataset(const std::string& split, const IdxOptions& options = {}) {
  const std::string folder = options.folder.empty() ? idx_folder() : options.folder;
  const std::optional<IdxFiles> files = find_idx_files(split, folder);
  if (files) return read_idx_dataset(*files, options);
  lockstep::detail::fail(
      "idx_dataset",
      {"no ", split == "train" ? "train" : "t10k",
       "-images-idx3-ubyte and -labels-idx1-ubyte, plain or .gz, in ", folder},
      "install Debian's dataset-fashion-mnist, set LOCKSTEP_DATA or --data to their folder, or ask "
      "for --data generated");
}

/// The files in the folder `source`; without one, `idx_dataset(split)`. Files that are missing or
/// damaged are an error. Only where `source` is "generated" it is `generated_dataset(split)`, with
/// as many samples as Fashion-MNIST has. A trainer's `--data` is `job.data()`.
inline ImageDataset fashion_mnist(const std::string& split, const std::string& source = "",
                                  Normalization normalization = {}) {
  if (source != "generated") {
    return idx_dataset(split, {.normalization = normalization, .folder = source});
  }
  GeneratedOptions options;
  options.samples = split == "train" ? 60'000 : 10'000;
  options.normalization = normalization;
  return generated_dataset(split, options);
}
