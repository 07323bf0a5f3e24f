// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `write_lmdb.hpp`: the part of the library that needs liblmdb.

#include <fcntl.h>
#include <lmdb.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/data/lmdb.hpp"
#include "lockstep/data/write_lmdb.hpp"

namespace lockstep::detail {

/// A file beside the one that it becomes. Who writes it holds a lock on it; what a killed process
/// has left is overwritten.
class LmdbTemporary {
 public:
  explicit LmdbTemporary(const std::string& path)
      : path_(path), temporary_(text({path, temporary_infix, "lmdb"})) {
    struct stat status{};
    do {
      file_ = Descriptor(::open(temporary_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
      if (!file_) fail_writing(errno);
      if (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0)
        fail("write_lmdb", {"'", path_, "' is being written"},
             "let one process write it, or write to another path");
      // Between its opening and this lock somebody may have removed it.
    } while (::fstat(file_.get(), &status) == 0 && status.st_nlink == 0);
    if (::lstat(path_.c_str(), &status) == 0) {
      ::unlink(temporary_.c_str());
      refuse_existing();
    }
    if (::ftruncate(file_.get(), 0) != 0) fail_writing(errno);
  }
  LmdbTemporary(const LmdbTemporary&) = delete;
  LmdbTemporary& operator=(const LmdbTemporary&) = delete;
  ~LmdbTemporary() {
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
  }

  const std::string& path() const { return temporary_; }
  const std::string& target() const { return path_; }

  void bring_into_place() {
    sync(temporary_);
    if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path_.c_str(), RENAME_NOREPLACE) != 0) {
      if (errno == EEXIST) refuse_existing();
      // Some file systems cannot rename with a condition. Who made the path meanwhile loses it.
      if ((errno != EINVAL && errno != ENOSYS) || ::rename(temporary_.c_str(), path_.c_str()) != 0)
        fail_writing(errno);
    }
    temporary_.clear();
    sync(folder_of(path_));
  }

  [[noreturn, gnu::cold]] void fail_writing(int error) const {
    // liblmdb calls it an input/output error where a part of a page was written.
    struct statvfs disk{};
    const bool is_full =
        error == EIO && ::statvfs(folder_of(path_).c_str(), &disk) == 0 && disk.f_bavail == 0;
    detail::fail_writing("write_lmdb", path_, is_full ? ENOSPC : error);
  }

 private:
  [[noreturn, gnu::cold]] void refuse_existing() const {
    fail("write_lmdb", {"'", path_, "' is there already"},
         "remove it first, or write to another path");
  }

  void sync(const std::string& path) const {
    const Descriptor opened(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    // A file system that has nothing to sync for a folder says EINVAL.
    if (!opened || (::fsync(opened.get()) != 0 && errno != EINVAL)) fail_writing(errno);
  }

  std::string path_;
  std::string temporary_;
  Descriptor file_;
};

/// The records that were not committed yet lie one behind another in memory, because a transaction
/// that finds the map full is made again in a larger one.
struct LmdbWriter::State {
  State(const std::string& path, const LmdbWriteOptions& options)
      : temporary(path), commit_bytes(options.commit_bytes) {
    require(mdb_env_create(&environment));
    try {
      require(mdb_env_set_mapsize(environment, map_bytes));
      // What is written counts when it is in place: until then nothing is synced. Memory is not
      // the file's (MDB_WRITEMAP), so that a full disk is an error code and no signal.
      constexpr unsigned flags = MDB_NOLOCK | MDB_NOSYNC | MDB_NOSUBDIR;
      require(mdb_env_open(environment, temporary.path().c_str(), flags, 0666));
    } catch (...) {
      close();
      throw;
    }
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() { close(); }

  void close() {
    if (environment != nullptr) mdb_env_close(std::exchange(environment, nullptr));
  }

  void require(int code) const {
    if (code == MDB_SUCCESS) return;
    if (code > 0) temporary.fail_writing(code);
    fail("write_lmdb", {"'", temporary.target(), "' cannot be written: ", mdb_strerror(code)},
         "look at the records and at the disk");
  }

  /// Puts all records that are held; MDB_MAP_FULL where they do not fit.
  int put(MDB_txn* transaction) {
    MDB_dbi database = 0;
    int code = mdb_dbi_open(transaction, nullptr, 0, &database);
    const std::byte* at = held.data();
    for (std::size_t i = 0; i != sizes.size() && code == MDB_SUCCESS; ++i) {
      auto number = lmdb_key(committed + i);
      MDB_val key{number.size(), number.data()};
      MDB_val value{sizes[i], const_cast<std::byte*>(at)};
      code = mdb_put(transaction, database, &key, &value, MDB_APPEND);
      at += sizes[i];
    }
    return code;
  }

  void commit() {
    while (!sizes.empty()) {
      MDB_txn* transaction = nullptr;
      require(mdb_txn_begin(environment, nullptr, 0, &transaction));
      int code = put(transaction);
      if (code == MDB_SUCCESS) {
        code = mdb_txn_commit(transaction);
      } else {
        mdb_txn_abort(transaction);
      }
      if (code == MDB_MAP_FULL) {
        map_bytes *= 2;
        require(mdb_env_set_mapsize(environment, map_bytes));
        continue;
      }
      require(code);
      committed += sizes.size();
      sizes.clear();
      held.clear();
    }
  }

  LmdbTemporary temporary;
  std::size_t commit_bytes;
  MDB_env* environment = nullptr;
  std::size_t map_bytes = 16_MiB;
  std::size_t committed = 0;  ///< records
  std::vector<std::byte> held;
  std::vector<std::size_t> sizes;
};

LOCKSTEP_INLINE LmdbWriter::LmdbWriter(const std::string& path, const LmdbWriteOptions& options) {
  state_ = std::make_unique<State>(path, options);
}

LOCKSTEP_INLINE LmdbWriter::~LmdbWriter() = default;

LOCKSTEP_INLINE void LmdbWriter::add(std::span<const std::byte> record) {
  State& state = *state_;
  if (constexpr std::size_t most = 0xffffffff; record.size() > most) {
    fail("write_lmdb",
         {"record ", state.committed + state.sizes.size(), " has ", record.size(),
          " bytes, and an LMDB holds records of at most ", most},
         "cut large samples into several records");
  }
  state.held.insert(state.held.end(), record.begin(), record.end());
  state.sizes.push_back(record.size());
  if (state.held.size() >= state.commit_bytes) state.commit();
}

LOCKSTEP_INLINE void LmdbWriter::finish() {
  state_->commit();
  state_->require(mdb_env_sync(state_->environment, 1));
  state_->close();
  state_->temporary.bring_into_place();
}

}  // namespace lockstep::detail
