// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `stage_copy.hpp`.

#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <optional>
#include <string_view>
#include <utility>

#include "lockstep/core/checksum.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/data/stage_copy.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE StagePlace::StagePlace(std::string in, std::string_view name)
    : folder(std::move(in)),
      local(text({folder, "/", name})),
      record(text({folder, "/.", name, ".staged"})),
      lock(text({folder, "/.", name, ".lock"})),
      temporary(text({folder, "/.", name, temporary_infix})) {}

LOCKSTEP_INLINE void StagePlace::remove_leftovers(std::string_view operation) const {
  const std::string beside_record = text({record, temporary_infix});
  for (const std::string& name : names_in(operation, folder)) {
    const std::string path = text({folder, "/", name});
    for (const std::string& front : {temporary, beside_record}) {
      // Another source may be called like a temporary; what is kept for it has longer names.
      if (path.starts_with(front) && checksum_from(path.substr(front.size()))) remove_tree(path);
    }
  }
}

LOCKSTEP_INLINE void remove_tree(const std::string& path) {
  constexpr auto remove = [](const char* each, const struct stat*, int, FTW*) {
    std::remove(each);
    return 0;
  };
  constexpr int open_folders = 16;
  ::nftw(path.c_str(), remove, open_folders, FTW_DEPTH | FTW_PHYS);
}

LOCKSTEP_INLINE StageCopy::StageCopy(const StageSource& source, const StagePlace& place,
                                     StageLock& lock)
    : source_(source),
      place_(place),
      lock_(lock),
      root_(text({place.temporary, random_token()})),
      all_(source.bytes()) {
  for (const StageFile& file : source.files) unpacks_ = unpacks_ || source.unpacks(file);
}

LOCKSTEP_INLINE void StageCopy::reserve() {
  if (source_.is_folder && ::mkdir(root_.c_str(), 0777) != 0) fail_writing(errno);
  for (const std::string& folder : source_.folders) {
    if (::mkdir(text({root_, "/", folder}).c_str(), 0777) != 0) fail_writing(errno);
  }
  for (const StageFile& file : source_.files) reserve(file);
}

LOCKSTEP_INLINE std::uint64_t free_bytes(const std::string& folder) {
  struct statvfs room{};
  return ::statvfs(folder.c_str(), &room) == 0 ? std::uint64_t{room.f_bavail} * room.f_frsize : 0;
}

LOCKSTEP_INLINE void StageCopy::reserve(const StageFile& file) {
  const std::string path = source_.local_path_of(file, root_);
  const Descriptor out(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!out) fail_writing(errno);
  while (file.bytes != 0 && ::fallocate(out.get(), 0, 0, static_cast<off_t>(file.bytes)) != 0) {
    if (errno == EINTR) continue;
    if (errno != EOPNOTSUPP && errno != ENOSYS) fail_writing(errno);
    // This file system cannot reserve. What it says of itself is better than nothing.
    if (free_bytes(place_.folder) < all_) fail_writing(ENOSPC);
    return;
  }
}

LOCKSTEP_INLINE void StageCopy::write() {
  for (const StageFile& file : source_.files) {
    files_.push_back(write(file));
    read_ += file.bytes;
  }
}

LOCKSTEP_INLINE StagedFile StageCopy::write(const StageFile& file) {
  const std::string path = source_.path_of(file);
  const std::string target = source_.local_path_of(file, root_);
  const Descriptor in(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!in) fail_reading(source_.rule.operation, path, errno);
  struct stat status{};
  if (::fstat(in.get(), &status) != 0) fail_reading(source_.rule.operation, path, errno);
  if (static_cast<std::uint64_t>(status.st_size) != file.bytes || time_of(status) != file.time)
    fail_changed(path);
  ::posix_fadvise(in.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
  const Descriptor out(::open(target.c_str(), O_WRONLY | O_CLOEXEC));
  if (!out) fail_writing(errno);

  const bool unpacks = source_.unpacks(file);
  Checksum checksum;
  std::uint64_t bytes = 0;
  std::uint64_t started = 0;
  const auto sink = [&](std::span<const std::byte> piece, std::uint64_t read) {
    if (!unpacks && read > file.bytes) fail_changed(path);
    checksum.add(piece);
    put(out.get(), piece, bytes);
    bytes += piece.size();
    written_ += piece.size();
    if (bytes >= started + 64 * write_chunk_bytes) {
      // The disk begins while the rest is still being read. An error would be seen by fsync.
      ::sync_file_range(out.get(), static_cast<off_t>(started), static_cast<off_t>(bytes - started),
                        SYNC_FILE_RANGE_WRITE);
      started = bytes;
    }
    lock_.progress(read_ + read, all_);
  };
  if (unpacks) {
    source_.rule.unpack(in.get(), path, sink);
  } else {
    read_plainly(source_.rule.operation, in.get(), path, sink);
    if (bytes != file.bytes) fail_changed(path);
  }

  // What was reserved for a compressed file was a guess.
  if (unpacks && ::ftruncate(out.get(), static_cast<off_t>(bytes)) != 0) fail_writing(errno);
  constexpr std::int64_t second = 1'000'000'000;
  const std::int64_t seconds = file.time / second - (file.time % second < 0 ? 1 : 0);
  const timespec times[2] = {{0, UTIME_OMIT}, {seconds, file.time - seconds * second}};
  if (::futimens(out.get(), times) != 0 || ::fsync(out.get()) != 0 ||
      ::fstat(out.get(), &status) != 0) {
    fail_writing(errno);
  }
  return {bytes, time_of(status), checksum.value()};
}

LOCKSTEP_INLINE void StageCopy::put(int file, std::span<const std::byte> bytes, std::uint64_t at) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail_writing(n < 0 ? errno : ENOSPC);
    at += static_cast<std::uint64_t>(n);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

/// Makes the names in a folder last; 0, or why that failed.
LOCKSTEP_INLINE int sync_folder(const std::string& folder) {
  const Descriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // A file system that has nothing to sync for a folder says EINVAL.
  return opened && (::fsync(opened.get()) == 0 || errno == EINVAL) ? 0 : errno;
}

/// What a copy replaces. A rename puts a file in the place of a file; a folder is moved away first,
/// and comes back unless it was replaced.
struct OldCopy {
  OldCopy(const StagePlace& place, bool by_folder) : local(place.local) {
    struct stat status{};
    if (::lstat(local.c_str(), &status) != 0 || !(by_folder || S_ISDIR(status.st_mode))) return;
    away = text({place.temporary, random_token()});
    if (::rename(local.c_str(), away.c_str()) == 0) return;
    error = errno;
    away.clear();
  }
  OldCopy(const OldCopy&) = delete;
  OldCopy& operator=(const OldCopy&) = delete;
  ~OldCopy() {
    if (away.empty()) return;
    if (is_replaced || ::rename(away.c_str(), local.c_str()) != 0) remove_tree(away);
  }

  std::string local;
  std::string away{};
  int error = 0;
  bool is_replaced = false;
};

LOCKSTEP_INLINE void StageCopy::commit(const std::string& identity) {
  if (source_.is_folder) {
    if (const int error = sync_folder(root_)) fail_writing(error);
    for (const std::string& folder : source_.folders) {
      if (const int error = sync_folder(text({root_, "/", folder}))) fail_writing(error);
    }
  }
  // Files may have been written to or replaced, or have come and gone.
  const std::string facts = source_.facts();
  if (StageSource(source_.rule, source_.path).facts() != facts) fail_changed(source_.path);

  const std::string record = stage_record(identity, facts, files_);
  TemporaryFile beside(source_.rule.operation, place_.record, record.size());
  beside.append(std::as_bytes(std::span(record)));
  beside.flush();
  OldCopy old(place_, source_.is_folder);
  if (old.error != 0) fail_writing(old.error);
  // The record comes before the copy. In between it fits nothing that is there: an older file has
  // another time.
  beside.commit();
  if (::rename(root_.c_str(), place_.local.c_str()) != 0) fail_writing(errno);
  old.is_replaced = true;
  if (const int error = sync_folder(place_.folder)) fail_writing(error);
}

LOCKSTEP_INLINE void StageCopy::fail_writing(int error) {
  remove_tree(root_);  // what it has taken is free again
  if (error != ENOSPC && error != EDQUOT)
    detail::fail_writing(source_.rule.operation, place_.local, error);
  fail(source_.rule.operation,
       {"'", place_.folder, "' has no room for '", source_.path, "' (", error_text(error),
        "): ", unpacks_ ? "more than " : "", unpacks_ && written_ > all_ ? written_ : all_,
        " bytes are needed and ", free_bytes(place_.folder), " are free"},
       "make room there, or name a folder on another disk");
}

LOCKSTEP_INLINE void StageCopy::fail_changed(const std::string& path) const {
  fail(source_.rule.operation, {"'", path, "' changed while it was copied"},
       "stage it when nothing writes to it any more");
}

}  // namespace lockstep::detail
