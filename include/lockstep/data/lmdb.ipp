// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `lmdb.hpp`.

#include <fcntl.h>
#include <lmdb.h>
#include <pthread.h>
#include <sys/stat.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/stopped.hpp"
#include "lockstep/data/lmdb.hpp"
#include "lockstep/data/lmdb_header.hpp"
#include "lockstep/data/lmdb_key.hpp"
#include "lockstep/launch/descriptor.hpp"
#include "lockstep/launch/file_faults.hpp"

namespace lockstep::detail {

[[noreturn, gnu::cold]] LOCKSTEP_INLINE void fail_lmdb(const std::string& file,
                                                       std::string_view doing, int code) {
  fail("lmdb_dataset", {"'", file, "' ", doing, ": ", mdb_strerror(code)},
       "check the file with mdb_stat, and copy or write it again if it is damaged");
}

[[noreturn, gnu::cold]] LOCKSTEP_INLINE void fail_lmdb_changed(const std::string& file,
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

/// Counts forks, and holds the files that this process has open.
class LmdbProcess {
 public:
  /// It is never destroyed: data sets may live until the process ends.
  static LmdbProcess& get() {
    static LmdbProcess& process = *new LmdbProcess;
    return process;
  }

  /// Another number in every process of a family.
  std::uint64_t number() const { return number_.load(std::memory_order_relaxed); }

  /// A file that was changed in place is another one: who opens it now reads what is there now.
  using Key = std::tuple<LmdbHeader, std::string, bool>;

  /// The open file of `key`, or what `make()` opens.
  template <class Make>
  std::shared_ptr<LmdbFile> find_or(const Key& key, const Make& make) {
    const std::lock_guard lock(mutex_);
    std::erase_if(files_, [](const auto& entry) { return entry.second.expired(); });
    std::weak_ptr<LmdbFile>& known = files_[key];
    std::shared_ptr<LmdbFile> file = known.lock();
    if (file == nullptr) known = file = make();
    return file;
  }

  /// Keeps what a parent has opened: it is not this process's to close.
  void keep(const LmdbReading* of_parent) {
    const std::lock_guard lock(mutex_);
    of_parents_.push_back(of_parent);
  }

 private:
  LmdbProcess() {
    // A fork waits for the lock, so that the child never finds it held by a thread that it does
    // not have.
    ::pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); },
                     [] {
                       get().number_.fetch_add(1, std::memory_order_relaxed);
                       get().mutex_.unlock();
                     });
  }

  std::atomic<std::uint64_t> number_ = 1;
  std::mutex mutex_;
  std::map<Key, std::weak_ptr<LmdbFile>> files_;
  std::vector<const LmdbReading*> of_parents_;
};

/// An open file: what it was when it was opened, and the environment of this process.
class LmdbFile {
 public:
  LmdbFile(std::string file, std::string database, bool read_ahead, const LmdbHeader& header)
      : file_(std::move(file)),
        database_(std::move(database)),
        read_ahead_(read_ahead),
        header_(header),
        reading_(make()) {}
  LmdbFile(const LmdbFile&) = delete;
  LmdbFile& operator=(const LmdbFile&) = delete;
  ~LmdbFile() {
    LmdbReading* const reading = reading_.load(std::memory_order_acquire);
    if (is_own(*reading)) {
      delete reading;
    } else {
      LmdbProcess::get().keep(reading);
    }
  }

  const std::string& file() const { return file_; }
  const LmdbHeader& header() const { return header_; }

  LmdbReading& reading() {
    LmdbReading* reading = reading_.load(std::memory_order_acquire);
    if (is_own(*reading)) [[likely]]
      return *reading;
    return open_again(reading);
  }

 private:
  static bool is_own(const LmdbReading& reading) {
    return reading.of_process == LmdbProcess::get().number();
  }

  LmdbReading* make() const {
    return new LmdbReading(file_, database_, read_ahead_, header_, LmdbProcess::get().number());
  }

  /// In a child: what the parent has mapped stays mapped, so that listed records stay where they
  /// are. Where several threads come here, one of them wins.
  LmdbReading& open_again(LmdbReading* of_parent) {
    std::unique_ptr<LmdbReading> own(make());
    LmdbReading* expected = of_parent;
    if (!reading_.compare_exchange_strong(expected, own.get(), std::memory_order_acq_rel))
      return *expected;
    LmdbProcess::get().keep(of_parent);
    return *own.release();
  }

  std::string file_;
  std::string database_;
  bool read_ahead_;
  LmdbHeader header_;
  std::atomic<LmdbReading*> reading_;
};

/// A cursor over all records, in the order of their keys.
class LmdbCursor {
 public:
  LmdbCursor(const LmdbFile& file, const LmdbReading& reading)
      : file_(file), transaction_(reading.begin(file.file())) {
    const int code = mdb_cursor_open(transaction_, reading.database, &cursor_);
    if (code != MDB_SUCCESS) {
      mdb_txn_abort(transaction_);
      fail_lmdb(file.file(), "cannot be read", code);
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
    if (code != MDB_SUCCESS) fail_lmdb(file_.file(), "cannot be read", code);
    return true;
  }

  std::string_view key() const { return {static_cast<const char*>(key_.mv_data), key_.mv_size}; }
  LmdbRecord record() const {
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
  const LmdbFile& file_;
  MDB_txn* transaction_;
  MDB_cursor* cursor_ = nullptr;
  MDB_val key_{};
  MDB_val value_{};
};

/// Memory for so many places, all unknown: the system gives pages of it when they are written. None
/// where there is not so much.
LOCKSTEP_INLINE std::shared_ptr<LmdbRecord[]> lmdb_places(std::size_t count) {
  auto* const places = static_cast<LmdbRecord*>(std::calloc(count, sizeof(LmdbRecord)));
  if (places == nullptr) return nullptr;
  return {places, [](LmdbRecord* memory) { std::free(memory); }};
}

LOCKSTEP_INLINE LmdbRecords::LmdbRecords(const std::string& path, const LmdbOptions& options) {
  const std::string file = lmdb_file_of(path);
  LmdbHeader header;
  {
    const Descriptor opened(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!opened) fail_reading("lmdb_dataset", file, errno);
    header = read_lmdb_header(opened.get(), file);
  }
  const LmdbProcess::Key key{header, options.database, options.read_ahead};
  file_ = LmdbProcess::get().find_or(key, [&] {
    return std::make_shared<LmdbFile>(file, options.database, options.read_ahead, header);
  });
  LmdbReading& reading = file_->reading();
  LmdbCursor cursor(*file_, reading);
  size_ = cursor.statistics(reading.database).ms_entries;
  const bool is_plain = cursor.flags(reading.database) == 0;
  const auto is_at = [&](MDB_cursor_op end, std::size_t number) {
    return cursor.move(end) && cursor.key() == LmdbKey(number).text();
  };
  if (size_ == 0) return;
  if (is_plain && !options.is_sample && is_at(MDB_FIRST, 0) && is_at(MDB_LAST, size_ - 1)) {
    if (size_ <= header.used_bytes / (8 * sizeof(LmdbRecord))) places_ = lmdb_places(size_);
    return;
  }
  places_ = lmdb_places(size_);
  if (places_ == nullptr) throw std::bad_alloc();
  std::size_t samples = 0;
  for (bool more = cursor.move(MDB_FIRST); more && samples != size_; more = cursor.move(MDB_NEXT)) {
    if (!options.is_sample || options.is_sample(cursor.key()))
      places_.get()[samples++] = cursor.record();
  }
  size_ = samples;
}

LOCKSTEP_INLINE const std::string& LmdbRecords::file() const { return file_->file(); }

LOCKSTEP_INLINE LmdbRecords::Reader::Reader(const LmdbRecords& records)
    : records_(records), reading_(records.file_->reading()) {
  require_whole();
  require_unchanged();
}

LOCKSTEP_INLINE LmdbRecords::Reader::~Reader() {
  if (transaction_ == nullptr) return;
  const std::lock_guard lock(reading_.mutex);
  reading_.transactions.push_back(static_cast<MDB_txn*>(transaction_));
}

LOCKSTEP_INLINE std::span<const std::byte> LmdbRecords::Reader::operator[](std::size_t index) {
  if (index >= records_.size_) records_.fail_index(index);
  if (records_.places_ == nullptr) {
    const LmdbRecord record = look_up(index);
    return {record.data, record.size};
  }
  // Several threads may look up the same record. The address comes last, and all find the same.
  LmdbRecord& place = records_.places_.get()[index];
  const std::atomic_ref data(place.data);
  const std::atomic_ref size(place.size);
  if (const std::byte* const known = data.load(std::memory_order_acquire))
    return {known, size.load(std::memory_order_relaxed)};
  const LmdbRecord record = look_up(index);
  size.store(record.size, std::memory_order_relaxed);
  data.store(record.data, std::memory_order_release);
  return {record.data, record.size};
}

LOCKSTEP_INLINE LmdbRecord LmdbRecords::Reader::look_up(std::size_t index) {
  if (transaction_ == nullptr) {
    const std::lock_guard lock(reading_.mutex);
    if (!reading_.transactions.empty()) {
      transaction_ = reading_.transactions.back();
      reading_.transactions.pop_back();
    } else {
      reading_.transactions.reserve(++reading_.begun);  // so that giving back cannot fail
    }
  }
  if (transaction_ == nullptr) transaction_ = reading_.begin(records_.file());
  const LmdbKey number(index);
  MDB_val key{number.bytes.size(), const_cast<unsigned char*>(number.bytes.data())};
  MDB_val value{};
  const int code = mdb_get(static_cast<MDB_txn*>(transaction_), reading_.database, &key, &value);
  if (code == MDB_NOTFOUND) {
    fail("lmdb_dataset",
         {"'", records_.file(), "' has no key ", index, ", though its first key is 0 and its last ",
          records_.size_ - 1},
         "give LmdbOptions::is_sample, which says by key what is a sample, or write the set again");
  }
  if (code != MDB_SUCCESS) fail_lmdb(records_.file(), "cannot be read", code);
  return {static_cast<const std::byte*>(value.mv_data), value.mv_size};
}

LOCKSTEP_INLINE void LmdbRecords::Reader::require_whole() const {
  const LmdbHeader& header = records_.file_->header();
  struct stat now{};
  // Reading what was cut off would end the process. It does so still where the file is cut between
  // this look and the read: nothing can be done about that.
  if (::fstat(reading_.descriptor, &now) != 0 ||
      static_cast<std::size_t>(now.st_size) < header.used_bytes)
    fail_lmdb_changed(records_.file(), "was cut off");
  if (now.st_mtim.tv_sec != header.changed_s || now.st_mtim.tv_nsec != header.changed_ns)
    fail_lmdb_changed(records_.file(), "was written to");
}

LOCKSTEP_INLINE void LmdbRecords::Reader::require_unchanged() const {
  MDB_envinfo info{};
  mdb_env_info(reading_.environment, &info);
  if (info.me_last_txnid != records_.file_->header().transaction)
    fail_lmdb_changed(records_.file(), "was written to");
}

LOCKSTEP_INLINE void LmdbRecords::fail_index(std::size_t index) const {
  fail("lmdb_dataset", {"record ", index, " of '", file(), "', which has ", size_},
       "draw numbers below size()");
}

LOCKSTEP_INLINE void LmdbRecords::rethrow_decoding(std::size_t index, std::size_t bytes) const {
  constexpr const char* advice = "look at this record, and at the function that decodes it";
  const auto error = [&](std::string_view words, std::string_view cure) {
    return Error("lmdb_dataset",
                 text({"record ", index, " of '", file(), "', ", bytes, " bytes: ", words}), cure);
  };
  try {
    throw;
  } catch (const Stopped&) {
    throw;
  } catch (const Error& thrown) {
    std::throw_with_nested(error(thrown.problem(), thrown.advice()));
  } catch (const std::exception& thrown) {
    std::throw_with_nested(error(thrown.what(), advice));
  } catch (...) {
    std::throw_with_nested(error("an exception that is no std::exception", advice));
  }
}

}  // namespace lockstep::detail
