// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The LMDB files that a process has open. A process that was forked opens them again.

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/data/lmdb_header.hpp"
#include "lockstep/data/lmdb_pages.hpp"
#include "lockstep/data/lmdb_reading.hpp"

namespace lockstep::detail {

class LmdbFile;

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
        pages_(file_, header),
        tree_(pages_.find(database_)),
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
  LmdbPages& pages() { return pages_; }
  /// Of the database that is read: there is one where `reading` could be made.
  // NOLINTNEXTLINE(bugprone-unchecked-optional-access): see there
  const LmdbTree& tree() const { return *tree_; }

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
  LmdbPages pages_;  // checked before `reading_` looks at them
  std::optional<LmdbTree> tree_;
  std::atomic<LmdbReading*> reading_;
};

}  // namespace lockstep::detail
