// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `temporary_file.hpp`.

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <mutex>
#include <vector>

#include "lockstep/core/text.hpp"
#include "lockstep/launch/file_faults.hpp"
#include "lockstep/launch/random.hpp"
#include "lockstep/launch/storage_progress.hpp"
#include "lockstep/launch/temporary_file.hpp"

namespace lockstep::detail {

/// The names of the temporaries that are being written.
struct TemporaryNames {
  std::mutex mutex;
  std::vector<std::string> names;

  static TemporaryNames& of_process() {
    static TemporaryNames names;
    return names;
  }
  void add(const std::string& name) {
    const std::lock_guard lock(mutex);
    names.push_back(name);
  }
  void forget(const std::string& name) {
    const std::lock_guard lock(mutex);
    std::erase(names, name);
  }
};

LOCKSTEP_INLINE void remove_temporary_files() {
  TemporaryNames& all = TemporaryNames::of_process();
  const std::lock_guard lock(all.mutex);
  for (const std::string& name : all.names) ::unlink(name.c_str());
}

LOCKSTEP_INLINE std::string random_token() { return random_id().substr(16); }

LOCKSTEP_INLINE TemporaryFile::TemporaryFile(std::string_view operation, const std::string& path,
                                             std::uint64_t bytes)
    : operation_(operation),
      path_(path),
      temporary_(text({path, temporary_infix, random_token()})) {
  constexpr int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
  file_ = Descriptor(::open(temporary_.c_str(), flags, 0666));
  if (!file_) fail_writing(operation_, path_, errno);
  TemporaryNames::of_process().add(temporary_);
  // Says at once if there is no room; some file systems cannot.
  while (bytes != 0 && ::fallocate(file_.get(), 0, 0, static_cast<off_t>(bytes)) != 0 &&
         errno != EOPNOTSUPP && errno != ENOSYS) {
    if (errno != EINTR) fail_now(errno);
  }
}

LOCKSTEP_INLINE void TemporaryFile::append(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  if (pending_count_ == pending_.size()) flush();
  pending_[pending_count_++] = {const_cast<std::byte*>(bytes.data()), bytes.size()};
  pending_bytes_ += bytes.size();
  if (pending_bytes_ >= write_chunk_bytes) flush();
}

LOCKSTEP_INLINE void TemporaryFile::seek(std::uint64_t place) {
  flush();
  place_ = place;
}

LOCKSTEP_INLINE void TemporaryFile::flush() {
  iovec* first = pending_.data();
  auto count = static_cast<int>(pending_count_);
  while (count != 0) {
    const ssize_t n = ::pwritev(file_.get(), first, count, static_cast<off_t>(place_));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail_now(n < 0 ? errno : ENOSPC);
    note_storage_progress();
    place_ += static_cast<std::uint64_t>(n);
    auto written = static_cast<std::size_t>(n);
    while (count != 0 && written >= first->iov_len) {
      written -= first->iov_len;
      ++first;
      --count;
    }
    if (written != 0) {
      first->iov_base = static_cast<std::byte*>(first->iov_base) + written;
      first->iov_len -= written;
    }
  }
  pending_count_ = 0;
  pending_bytes_ = 0;
  start_writeback();
}

LOCKSTEP_INLINE void TemporaryFile::commit() {
  flush();
  if (::fsync(file_.get()) != 0) fail_now(errno);
  note_storage_progress();
  // While the file that is replaced is open, its blocks are not given back: that may take longer
  // than the writing (ext4 with `discard`), and is none of what has to be on the disk now.
  const Descriptor replaced(::open(path_.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_now(errno);
  TemporaryNames::of_process().forget(temporary_);
  temporary_.clear();
  const std::string folder = folder_of(path_);
  const Descriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // A file system that has nothing to sync for a folder says EINVAL.
  if (!opened || (::fsync(opened.get()) != 0 && errno != EINVAL))
    fail_writing(operation_, path_, errno);
}

/// The disk begins while the rest is still being copied. An error would be seen by fsync.
LOCKSTEP_INLINE void TemporaryFile::start_writeback() {
  if (place_ < started_ + 64 * write_chunk_bytes) return;
  ::sync_file_range(file_.get(), static_cast<off_t>(started_),
                    static_cast<off_t>(place_ - started_), SYNC_FILE_RANGE_WRITE);
  started_ = place_;
}

LOCKSTEP_INLINE void TemporaryFile::remove() {
  if (temporary_.empty()) return;
  ::unlink(temporary_.c_str());
  TemporaryNames::of_process().forget(temporary_);
}

/// A destructor does not run where the constructor fails.
LOCKSTEP_INLINE void TemporaryFile::fail_now(int error) {
  remove();
  fail_writing(operation_, path_, error);
}

}  // namespace lockstep::detail
