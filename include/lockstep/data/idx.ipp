// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `idx.hpp`.

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string_view>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/data/idx.hpp"

namespace lockstep {

namespace detail {

/// A file that is read from front to back; zlib reads plain files too.
class IdxFile {
 public:
  explicit IdxFile(const std::string& path) : path_(path) {
    errno = 0;
    file_ = gzopen(path.c_str(), "rb");
    if (file_ == nullptr) fail({"it cannot be opened: ", std::strerror(errno)}, "check the path");
    gzbuffer(file_, 256_KiB);
  }
  IdxFile(const IdxFile&) = delete;
  IdxFile& operator=(const IdxFile&) = delete;
  ~IdxFile() { gzclose(file_); }

  /// Reads as much of `out` as there is.
  std::size_t read(std::span<std::uint8_t> out) {
    const int count = gzread(file_, out.data(), static_cast<unsigned>(out.size()));
    int code = Z_OK;
    const char* const text = gzerror(file_, &code);
    if (code == Z_BUF_ERROR) fail({"the gzip stream ends early"}, copy_again);
    if (code == Z_ERRNO) fail({"reading failed: ", std::strerror(errno)}, copy_again);
    if (count < 0 || code != Z_OK) fail({"the gzip stream is damaged: ", text}, copy_again);
    return static_cast<std::size_t>(count);
  }

  /// Fills `out`; `what` is missing if the file ends before.
  void fill(std::span<std::uint8_t> out, std::string_view what) {
    if (read(out) != out.size()) fail({"it ends within ", what}, copy_again);
  }

  [[noreturn]] void fail(std::initializer_list<Word> problem, std::string_view advice) const {
    detail::fail("read_idx", {path_, ": ", text(problem)}, advice);
  }

  static constexpr const char* copy_again = "copy or download the file again";

 private:
  std::string path_;
  gzFile file_ = nullptr;
};

LOCKSTEP_INLINE std::size_t big_endian(const std::array<std::uint8_t, 4>& bytes) {
  return std::size_t{bytes[0]} << 24 | std::size_t{bytes[1]} << 16 | std::size_t{bytes[2]} << 8 |
         std::size_t{bytes[3]};
}

}  // namespace detail

LOCKSTEP_INLINE IdxArray read_idx(const std::string& path, std::optional<std::size_t> dimensions) {
  detail::IdxFile file(path);
  std::array<std::uint8_t, 4> word{};
  file.fill(word, "its first four bytes");
  if (word[0] != 0 || word[1] != 0)
    file.fail({"it does not begin with two zero bytes"}, "give an IDX file, plain or gzip");
  if (constexpr std::uint8_t unsigned_bytes = 0x08; word[2] != unsigned_bytes)
    file.fail({"its element type is number ", word[2]},
              "give a file of unsigned bytes, which are number 8");
  if (dimensions && word[3] != *dimensions)
    file.fail({"it has ", word[3], " dimensions instead of ", *dimensions},
              "images have three (count, rows, columns) and labels one; are the two mixed up?");

  IdxArray array;
  array.extents.resize(word[3]);
  std::size_t bytes = 1;
  for (std::size_t& extent : array.extents) {
    file.fill(word, "its header");
    extent = detail::big_endian(word);
    bytes = detail::saturating_product(bytes, extent);
  }
  // Reads in steps: a damaged header may promise more than memory holds.
  while (array.bytes.size() < bytes) {
    const std::size_t begin = array.bytes.size();
    array.bytes.resize(begin + std::min(bytes - begin, 16_MiB));
    file.fill(std::span(array.bytes).subspan(begin),
              detail::text({"the ", bytes, " bytes that its header promises"}));
  }
  if (file.read(std::span(word).first(1)) != 0)
    file.fail({"bytes follow the ", bytes, " that its header promises"},
              detail::IdxFile::copy_again);
  return array;
}

}  // namespace lockstep
