// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `mapped_file.hpp`.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/data/mapped_file.hpp"

namespace lockstep {

namespace detail {

/// Half of this machine's memory, in bytes.
LOCKSTEP_INLINE std::size_t half_of_memory() {
  static const std::size_t bytes = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) / 2 *
                                   static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace detail

LOCKSTEP_INLINE MappedFile::MappedFile(const std::string& path, Access access,
                                       std::string_view operation)
    : path_(path), operation_(operation), access_(access) {
  // Without O_NONBLOCK a pipe of this name would wait for its writer.
  file_ = detail::Descriptor(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file_) detail::fail_reading(operation_, path_, errno);
  struct stat status{};
  if (::fstat(file_.get(), &status) != 0) detail::fail_reading(operation_, path_, errno);
  if (S_ISDIR(status.st_mode)) detail::fail_reading(operation_, path_, EISDIR);
  if (!S_ISREG(status.st_mode)) {
    detail::fail(operation_, {"'", path_, "' is no regular file"},
                 "give a file on a disk: a pipe or a device cannot be mapped");
  }
  written_ = status.st_mtim;
  const auto size = static_cast<std::size_t>(status.st_size);
  if (access_ == Access::automatic)
    access_ = size > detail::half_of_memory() ? Access::random : Access::usual;
  if (size == 0) return;  // the kernel maps nothing of an empty file
  void* const begin = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file_.get(), 0);
  if (begin == MAP_FAILED) {
    detail::fail(
        operation_,
        {"'", path_, "' of ", size, " bytes cannot be mapped: ", detail::error_text(errno)},
        "raise the limit on address space (ulimit -v), or copy the file to a local disk");
  }
  bytes_ = {static_cast<const std::byte*>(begin), size};
  // Advice is no demand: a file system that has none to give says so, and is read all the same.
  if (access_ == Access::random) ::madvise(begin, size, MADV_RANDOM);
  if (access_ == Access::sequential) ::madvise(begin, size, MADV_SEQUENTIAL);
}

LOCKSTEP_INLINE MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      operation_(std::move(other.operation_)),
      file_(std::move(other.file_)),
      bytes_(std::exchange(other.bytes_, {})),
      written_(other.written_),
      access_(other.access_) {}

LOCKSTEP_INLINE MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(operation_, other.operation_);
  std::swap(file_, other.file_);
  std::swap(bytes_, other.bytes_);
  std::swap(written_, other.written_);
  std::swap(access_, other.access_);
  return *this;
}

LOCKSTEP_INLINE MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

LOCKSTEP_INLINE void MappedFile::require_intact() const {
  struct stat now{};
  if (::fstat(file_.get(), &now) != 0) detail::fail_reading(operation_, path_, errno);
  const bool same_size = static_cast<std::size_t>(now.st_size) == bytes_.size();
  const bool same_time =
      now.st_mtim.tv_sec == written_.tv_sec && now.st_mtim.tv_nsec == written_.tv_nsec;
  if (same_size && same_time) [[likely]]
    return;
  constexpr const char* advice =
      "start the job again, and put a new file in its place by a rename (mv), which running jobs "
      "do not see";
  if (!same_size) {
    detail::fail(operation_,
                 {"'", path_, "' has changed while it was in use: it had ", bytes_.size(),
                  " bytes and has ", static_cast<std::size_t>(now.st_size)},
                 advice);
  }
  detail::fail(operation_,
               {"'", path_, "' has changed while it was in use: its ", bytes_.size(),
                " bytes were written to"},
               advice);
}

LOCKSTEP_INLINE void MappedFile::will_read(std::size_t first, std::size_t count) const {
  if (count == 0) return;
  static const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t begin = first / page * page;
  ::madvise(const_cast<std::byte*>(bytes_.data()) + begin, first + count - begin, MADV_WILLNEED);
}

}  // namespace lockstep
