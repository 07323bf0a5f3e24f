// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `idx.hpp`.

#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <initializer_list>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/data/idx.hpp"
#include "lockstep/data/mapped_file.hpp"
#include "lockstep/launch/descriptor.hpp"

namespace lockstep {

namespace detail {

/// What can be wrong with any IDX file, and where: `place` is a byte of what gzip has packed.
struct IdxFault {
  const std::string& path;

  [[noreturn, gnu::cold]] void at(std::size_t place, std::initializer_list<Word> problem,
                                  std::string_view advice = copy_again) const {
    fail("read_idx", {"'", path, "', byte ", place, ": ", text(problem)}, advice);
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
      fault_.at(0, {"it cannot be opened: ", error_text(errno)}, "check the path");
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
    if (code == Z_ERRNO) fault_.at(place, {"reading failed: ", error_text(errno)});
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

LOCKSTEP_INLINE std::size_t big_endian(const std::array<std::uint8_t, 4>& bytes) {
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
    bytes = saturating_product(bytes, extent);
  }
  array.bytes = file.rest(place, bytes);
  return array;
}

}  // namespace detail

LOCKSTEP_INLINE IdxArray read_idx(const std::string& path, std::optional<std::size_t> dimensions) {
  struct stat status{};
  const bool is_pipe =
      ::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode);
  if (!is_pipe) {
    auto file = std::make_shared<const MappedFile>(path, Access::automatic, "read_idx");
    const std::span<const std::byte> bytes = file->bytes();
    const bool is_gzip =
        bytes.size() >= 2 && bytes[0] == std::byte{0x1f} && bytes[1] == std::byte{0x8b};
    if (!is_gzip)
      return detail::read_idx_from(detail::IdxMap(path, std::move(file)), path, dimensions);
  }
  return detail::read_idx_from(detail::IdxStream(path), path, dimensions);
}

}  // namespace lockstep
