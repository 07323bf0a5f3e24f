// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What an LMDB file says of itself, checked before liblmdb maps it: a file that is shorter
/// than it claims would end the process when it is read.

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// The newer of the two meta pages of an LMDB file, and which file it is.
struct LmdbHeader {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::int64_t changed_s = 0;  ///< the time of the last change: seconds and nanoseconds
  std::int64_t changed_ns = 0;
  std::size_t file_bytes = 0;
  std::size_t page_bytes = 0;
  std::size_t used_bytes = 0;  ///< up to the end of the last page
  std::uint64_t transaction = 0;

  auto operator<=>(const LmdbHeader&) const = default;
};

/// The file of a path: the path itself, or `data.mdb` where it is a folder.
std::string lmdb_file_of(const std::string& path);

/// Reads and checks the header of the file `path` that is open as `fd`.
LmdbHeader read_lmdb_header(int fd, const std::string& path);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/lmdb_header.ipp"
#endif
