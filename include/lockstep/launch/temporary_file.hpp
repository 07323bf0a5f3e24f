// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Writes a file so that, whatever happens, there is the old file or the new one.

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/launch/descriptor.hpp"

namespace lockstep::detail {

/// What the names of temporaries have behind the name of the file: `.tmp-` and random digits.
inline constexpr std::string_view temporary_infix = ".tmp-";

/// 16 random hexadecimal digits: names that no file has yet.
std::string random_token();

/// Removes the temporaries that this process is writing, because it gives up on its storage: a
/// `TemporaryFile` whose file is gone fails to commit. Any thread may call it.
void remove_temporary_files();

/// What is collected before it is written. It is a multiple of every element's size.
inline constexpr std::size_t write_chunk_bytes = 1_MiB;

/// A file beside `path` that `commit` brings into its place, and that is removed again otherwise.
/// Errors are in words, and name the operation.
class TemporaryFile {
 public:
  /// Room for `bytes` is reserved at once, where the file system can.
  TemporaryFile(std::string_view operation, const std::string& path, std::uint64_t bytes);
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() { remove(); }

  /// Appends to what will be written, behind what was appended before. The bytes stay as they are
  /// until `flush`, `seek` or `commit`.
  void append(std::span<const std::byte> bytes);
  void seek(std::uint64_t place);
  void flush();

  /// Syncs the file, renames it to `path` and syncs the folder.
  void commit();

 private:
  void start_writeback();
  void remove();
  [[noreturn]] void fail_now(int error);

  std::string operation_;
  std::string path_;
  std::string temporary_;
  Descriptor file_;
  std::uint64_t place_ = 0;
  std::uint64_t started_ = 0;
  std::array<iovec, 128> pending_{};
  std::size_t pending_count_ = 0;
  std::size_t pending_bytes_ = 0;
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/launch/temporary_file.ipp"
#endif
