// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `lmdb_header.hpp`.

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstring>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/data/lmdb_header.hpp"

namespace lockstep::detail {

/// The front of a meta page as a 64-bit program writes it (`MDB_page` and `MDB_meta` of liblmdb
/// 0.9).
struct LmdbMetaPage {
  std::uint64_t page;
  std::uint16_t pad;
  std::uint16_t flags;
  std::uint32_t free;
  std::uint32_t magic;
  std::uint32_t version;
  std::uint64_t address;
  std::uint64_t map_bytes;
  std::uint32_t page_bytes;  ///< the pad of the first of two databases of 48 bytes
  std::array<std::uint32_t, 23> databases;
  std::uint64_t last_page;
  std::uint64_t transaction;
};
static_assert(sizeof(LmdbMetaPage) == 152);

inline constexpr std::uint32_t lmdb_magic = 0xBEEFC0DE;

LOCKSTEP_INLINE std::string lmdb_file_of(const std::string& path) {
  struct stat status{};
  const bool is_folder = ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
  return is_folder ? text({path, "/data.mdb"}) : path;
}

/// The meta page at `offset`, with what is checked of each.
LOCKSTEP_INLINE LmdbMetaPage read_lmdb_meta(int fd, const std::string& path, std::size_t offset,
                                            std::size_t file_bytes) {
  constexpr const char* operation = "lmdb_dataset";
  std::array<std::byte, sizeof(LmdbMetaPage)> bytes{};
  if (offset > file_bytes || file_bytes - offset < bytes.size()) {
    fail(operation,
         {"'", path, "' has ", file_bytes, " bytes, and the meta page at offset ", offset,
          " of an LMDB file ends behind them"},
         "copy or download the file again");
  }
  if (::pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset)) !=
      static_cast<ssize_t>(bytes.size()))
    fail_reading(operation, path, errno);
  const auto meta = std::bit_cast<LmdbMetaPage>(bytes);
  if (meta.magic != lmdb_magic) {
    std::uint32_t earlier = 0;  // a 32-bit program's page header has 12 bytes
    std::memcpy(&earlier, bytes.data() + 12, sizeof earlier);
    if (meta.magic == 0xDEC0EFBE || earlier == lmdb_magic) {
      fail(operation,
           {"'", path, "' was written ",
            earlier == lmdb_magic ? "by a 32-bit program" : "on a machine of the other byte order"},
           "write it again on a 64-bit little-endian machine: mdb_dump there, mdb_load here");
    }
    fail(operation,
         {"'", path, "' is no LMDB file: the four bytes at offset ", offset + 16,
          " are not its mark, 0xBEEFC0DE"},
         "give an LMDB file, or the folder that holds its data.mdb");
  }
  constexpr std::uint32_t known = 1;
  if (meta.version != known) {
    fail(operation,
         {"'", path, "' is an LMDB file of format ", meta.version, ", and liblmdb reads format ",
          known},
         "write it again: mdb_dump by the program that wrote it, mdb_load here");
  }
  // The format has 15 bits for a place within a page.
  constexpr std::uint32_t least = 256;
  constexpr std::uint32_t most = 32768;
  if (!std::has_single_bit(meta.page_bytes) || meta.page_bytes < least || meta.page_bytes > most) {
    fail(operation,
         {"'", path, "' has pages of ", meta.page_bytes, " bytes, said at offset ", offset + 40,
          ", and liblmdb reads those of ", least, " to ", most, ", powers of two"},
         "copy the file again, or write it on a machine of smaller pages");
  }
  return meta;
}

LOCKSTEP_INLINE LmdbHeader read_lmdb_header(int fd, const std::string& path) {
  struct stat status{};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
    fail("lmdb_dataset", {"'", path, "' is no file"},
         "give an LMDB file, or the folder that holds its data.mdb");
  }
  LmdbHeader header;
  header.device = status.st_dev;
  header.inode = status.st_ino;
  header.changed_s = status.st_mtim.tv_sec;
  header.changed_ns = status.st_mtim.tv_nsec;
  header.file_bytes = static_cast<std::size_t>(status.st_size);
  LmdbMetaPage meta = read_lmdb_meta(fd, path, 0, header.file_bytes);
  const LmdbMetaPage second = read_lmdb_meta(fd, path, meta.page_bytes, header.file_bytes);
  if (meta.page_bytes != second.page_bytes) {
    fail("lmdb_dataset",
         {"'", path, "' has pages of ", meta.page_bytes, " bytes by its first meta page and of ",
          second.page_bytes, " by its second"},
         "copy or download the file again");
  }
  if (second.transaction > meta.transaction) meta = second;
  header.page_bytes = meta.page_bytes;
  header.used_bytes = meta.last_page >= too_large / meta.page_bytes
                          ? too_large
                          : (meta.last_page + 1) * meta.page_bytes;
  header.transaction = meta.transaction;
  if (header.used_bytes > header.file_bytes) {
    fail("lmdb_dataset",
         {"'", path, "' is cut off: it has ", header.file_bytes, " bytes, and its last page, ",
          meta.last_page, ", ends at byte ", header.used_bytes},
         "copy or download the file again; where it is the original, `mdb_copy -c` makes a whole "
         "one");
  }
  return header;
}

}  // namespace lockstep::detail
