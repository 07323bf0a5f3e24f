// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What liblmdb opens of a file: the environment of one process, and cursors over its
/// records.

#include <lmdb.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/data/lmdb_header.hpp"

namespace lockstep::detail {

[[noreturn, gnu::cold]] inline void fail_lmdb(const std::string& file, std::string_view doing,
                                              int code) {
  fail("lmdb_dataset", {"'", file, "' ", doing, ": ", mdb_strerror(code)},
       "check the file with mdb_stat, and copy or write it again if it is damaged");
}

[[noreturn, gnu::cold]] inline void fail_lmdb_changed(const std::string& file,
                                                      std::string_view how) {
  fail("lmdb_dataset", {"'", file, "' ", how, " while it was open"},
       "write a new set under another name, or rename it into place: open sets keep the old one");
}

/// The environment of one process. A process that was forked must not use its parent's, so each
/// makes its own, and leaves the other as it is.
struct LmdbReading {
  LmdbReading(const std::string& file, const std::string& database, bool read_ahead,
              const LmdbHeader& header, std::uint64_t process)
      : of_process(process) {
    int code = mdb_env_create(&environment);
    if (code != MDB_SUCCESS) fail_lmdb(file, "cannot be opened", code);
    try {
      open(file, database, read_ahead, header);
    } catch (...) {
      mdb_env_close(environment);
      throw;
    }
  }
  LmdbReading(const LmdbReading&) = delete;
  LmdbReading& operator=(const LmdbReading&) = delete;
  ~LmdbReading() {
    for (MDB_txn* transaction : transactions) mdb_txn_abort(transaction);
    mdb_env_close(environment);
  }

  MDB_txn* begin(const std::string& file) const {
    MDB_txn* transaction = nullptr;
    const int code = mdb_txn_begin(environment, nullptr, MDB_RDONLY, &transaction);
    if (code != MDB_SUCCESS) fail_lmdb(file, "cannot be read", code);
    return transaction;
  }

  std::uint64_t of_process;  ///< as `LmdbProcess` counts them
  MDB_env* environment = nullptr;
  MDB_dbi database = 0;
  int descriptor = -1;
  std::mutex mutex;
  std::vector<MDB_txn*> transactions;  ///< those that no thread uses now
  std::size_t begun = 0;               ///< how many there are with those in use

 private:
  void open(const std::string& file, const std::string& name, bool read_ahead,
            const LmdbHeader& header) {
    // Without these liblmdb maps what the writer had reserved, which may be terabytes.
    mdb_env_set_mapsize(environment, header.used_bytes);
    if (!name.empty()) mdb_env_set_maxdbs(environment, 1);
    const unsigned flags = MDB_RDONLY | MDB_NOLOCK | MDB_NOTLS | MDB_NOSUBDIR |
                           (read_ahead ? 0u : static_cast<unsigned>(MDB_NORDAHEAD));
    int code = mdb_env_open(environment, file.c_str(), flags, 0);
    if (code != MDB_SUCCESS) fail_lmdb(file, "cannot be opened", code);
    mdb_env_get_fd(environment, &descriptor);
    if (read_lmdb_header(descriptor, file) != header) fail_lmdb_changed(file, "was replaced");
    MDB_txn* const transaction = begin(file);
    code = mdb_dbi_open(transaction, name.empty() ? nullptr : name.c_str(), 0, &database);
    if (code != MDB_SUCCESS) {
      mdb_txn_abort(transaction);
      if (code == MDB_NOTFOUND) {
        fail("lmdb_dataset", {"'", file, "' has no database '", name, "'"},
             "leave LmdbOptions::database out for the main one; `mdb_stat -a` lists all");
      }
      fail_lmdb(file, "cannot be read", code);
    }
    mdb_txn_commit(transaction);  // which keeps the handle
  }
};

/// A cursor over all records, in the order of their keys.
class LmdbCursor {
 public:
  LmdbCursor(const std::string& file, const LmdbReading& reading)
      : file_(file), transaction_(reading.begin(file)) {
    const int code = mdb_cursor_open(transaction_, reading.database, &cursor_);
    if (code != MDB_SUCCESS) {
      mdb_txn_abort(transaction_);
      fail_lmdb(file, "cannot be read", code);
    }
  }
  LmdbCursor(const LmdbCursor&) = delete;
  LmdbCursor& operator=(const LmdbCursor&) = delete;
  ~LmdbCursor() {
    mdb_cursor_close(cursor_);
    mdb_txn_abort(transaction_);
  }

  /// False where there is no such record.
  bool move(MDB_cursor_op how) {
    const int code = mdb_cursor_get(cursor_, &key_, &value_, how);
    if (code == MDB_NOTFOUND) return false;
    if (code != MDB_SUCCESS) fail_lmdb(file_, "cannot be read", code);
    return true;
  }

  std::string_view key() const { return {static_cast<const char*>(key_.mv_data), key_.mv_size}; }
  std::span<const std::byte> value() const {
    return {static_cast<const std::byte*>(value_.mv_data), value_.mv_size};
  }

  MDB_stat statistics(MDB_dbi database) const {
    MDB_stat all{};
    mdb_stat(transaction_, database, &all);
    return all;
  }
  unsigned flags(MDB_dbi database) const {
    unsigned flags = 0;
    mdb_dbi_flags(transaction_, database, &flags);
    return flags;
  }

 private:
  const std::string& file_;
  MDB_txn* transaction_;
  MDB_cursor* cursor_ = nullptr;
  MDB_val key_{};
  MDB_val value_{};
};

}  // namespace lockstep::detail
