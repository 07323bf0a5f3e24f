// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Writes LMDB files: the part of the library that needs liblmdb.

#include <fcntl.h>
#include <lmdb.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>

#include "lockstep/detail/data/lmdb.hpp"

namespace lockstep::detail {

/// Writes records, numbered from 0, into a locked temporary beside `path`, which `finish` renames;
/// without `finish` nothing stays. The next writer overwrites what a killed process has left.
class LmdbWriter {
 public:
  LmdbWriter(const std::string& path, std::size_t commit_bytes)
      : path_(path),
        temporary_(text({path, temporary_infix, "lmdb"})),
        commit_bytes_(commit_bytes) {
    struct stat status{};
    do {
      lock_ = Descriptor(::open(temporary_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
      if (!lock_) fail_writing(errno);
      if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0)
        fail("write_lmdb", {"'", path_, "' is being written"},
             "let one process write it, or write to another path");
      // Another process may have removed the file between open and lock.
    } while (::fstat(lock_.get(), &status) == 0 && status.st_nlink == 0);
  }
  LmdbWriter(const LmdbWriter&) = delete;
  LmdbWriter& operator=(const LmdbWriter&) = delete;
  ~LmdbWriter() {
    environment_.reset();
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
  }

  void open() {
    struct stat status{};
    if (::lstat(path_.c_str(), &status) == 0) reject_existing();
    if (::ftruncate(lock_.get(), 0) != 0) fail_writing(errno);
    MDB_env* opened = nullptr;
    require(mdb_env_create(&opened));
    environment_.reset(opened);
    require(mdb_env_set_mapsize(opened, map_bytes_));
    // No sync before `finish`. Without MDB_WRITEMAP a full disk is an error and no signal.
    constexpr unsigned flags = MDB_NOLOCK | MDB_NOSYNC | MDB_NOSUBDIR;
    require(mdb_env_open(opened, temporary_.c_str(), flags, 0666));
  }

  void add(std::span<const std::byte> record) {
    if (constexpr std::size_t most = 0xffffffff; record.size() > most) {
      fail("write_lmdb",
           {"record ", committed_ + sizes_.size(), " has ", record.size(),
            " bytes, and an LMDB holds records of at most ", most},
           "cut large samples into several records");
    }
    held_.insert(held_.end(), record.begin(), record.end());
    sizes_.push_back(record.size());
    if (held_.size() >= commit_bytes_) commit();
  }

  void finish() {
    commit();
    require(mdb_env_sync(environment_.get(), 1));
    environment_.reset();
    const char* const from = temporary_.c_str();
    if (::fsync(lock_.get()) != 0) fail_writing(errno);
    if (::renameat2(AT_FDCWD, from, AT_FDCWD, path_.c_str(), RENAME_NOREPLACE) != 0) {
      if (errno == EEXIST) reject_existing();
      // Some file systems can only rename by replacing, even a path that was made meanwhile.
      if ((errno != EINVAL && errno != ENOSYS) || ::rename(from, path_.c_str()) != 0)
        fail_writing(errno);
    }
    temporary_.clear();
    sync_folder_of("write_lmdb", path_);
  }

 private:
  void commit() {
    while (!sizes_.empty()) {
      MDB_txn* transaction = nullptr;
      require(mdb_txn_begin(environment_.get(), nullptr, 0, &transaction));
      int code = put(transaction);
      if (code == MDB_SUCCESS) {
        code = mdb_txn_commit(transaction);
      } else {
        mdb_txn_abort(transaction);
      }
      if (code == MDB_MAP_FULL) {
        require(mdb_env_set_mapsize(environment_.get(), map_bytes_ *= 2));
        continue;
      }
      require(code);
      committed_ += sizes_.size();
      sizes_.clear();
      held_.clear();
    }
  }

  /// Puts all held records; MDB_MAP_FULL if they do not fit.
  int put(MDB_txn* transaction) const {
    MDB_dbi database = 0;
    int code = mdb_dbi_open(transaction, nullptr, 0, &database);
    const std::byte* at = held_.data();
    for (std::size_t i = 0; i != sizes_.size() && code == MDB_SUCCESS; ++i) {
      auto number = lmdb_key(committed_ + i);
      MDB_val key{number.size(), number.data()};
      MDB_val value{sizes_[i], const_cast<std::byte*>(at)};
      code = mdb_put(transaction, database, &key, &value, MDB_APPEND);
      at += sizes_[i];
    }
    return code;
  }

  void require(int code) const {
    if (code == MDB_SUCCESS) return;
    if (code > 0) fail_writing(code);
    fail("write_lmdb", {"'", path_, "' cannot be written: ", mdb_strerror(code)},
         "look at the records and at the disk");
  }

  [[noreturn]] void fail_writing(int error) const {
    // liblmdb reports a partially written page as an input/output error.
    struct statvfs disk{};
    const bool is_full =
        error == EIO && ::statvfs(folder_of(path_).c_str(), &disk) == 0 && disk.f_bavail == 0;
    detail::fail_writing("write_lmdb", path_, is_full ? ENOSPC : error);
  }

  [[noreturn]] void reject_existing() const {
    fail("write_lmdb", {"'", path_, "' is there already"},
         "remove it first, or write to another path");
  }

  std::string path_;
  std::string temporary_;  ///< empty after the rename
  Descriptor lock_;        ///< of the temporary
  std::unique_ptr<MDB_env, void (*)(MDB_env*)> environment_{nullptr, mdb_env_close};
  std::size_t commit_bytes_;
  std::size_t map_bytes_ = 16_MiB;
  std::size_t committed_ = 0;  ///< records
  /// Uncommitted records, to repeat a transaction with a larger map if the map is full.
  std::vector<std::byte> held_;
  std::vector<std::size_t> sizes_;
};

LOCKSTEP_INLINE void write_lmdb_records(
    const std::string& path, std::size_t commit_bytes, std::size_t count,
    FunctionRef<void(std::size_t, std::vector<std::byte>&)> encode) {
  LmdbWriter out(path, commit_bytes);
  out.open();
  std::vector<std::byte> record;
  for (std::size_t i = 0; i != count; ++i) {
    record.clear();
    encode(i, record);
    out.add(record);
  }
  out.finish();
}

}  // namespace lockstep::detail
