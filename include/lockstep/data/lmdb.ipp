// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `lmdb.hpp`.

#include <fcntl.h>
#include <lmdb.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>

#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/data/lmdb.hpp"
#include "lockstep/data/lmdb_file.hpp"
#include "lockstep/data/lmdb_header.hpp"
#include "lockstep/data/lmdb_key.hpp"
#include "lockstep/data/lmdb_reading.hpp"

namespace lockstep::detail {

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
  LmdbCursor cursor(file_->file(), reading);
  size_ = cursor.statistics(reading.database).ms_entries;
  const bool is_plain = cursor.flags(reading.database) == 0;
  const auto is_at = [&](MDB_cursor_op end, std::size_t number) {
    return cursor.move(end) && cursor.key() == LmdbKey(number).text();
  };
  if (size_ == 0) return;
  const auto fail_count = [&] {
    fail("lmdb_dataset",
         {"'", file, "' is damaged: it has not the ", size_, " records that it names"},
         "copy or download the file again, or write the set again");
  };
  if (size_ > header.used_bytes) fail_count();
  const LmdbTree& tree = file_->tree();
  const bool may_be_ours = is_plain && tree.flags == 0 && !options.is_sample;
  if (may_be_ours) file_->pages().check_ends(tree);
  if (may_be_ours && is_at(MDB_FIRST, 0) && is_at(MDB_LAST, size_ - 1)) {
    if (size_ <= header.used_bytes / (8 * sizeof(LmdbRecord))) places_ = lmdb_places(size_);
    return;
  }
  places_ = lmdb_places(size_);
  if (places_ == nullptr) throw std::bad_alloc();
  file_->pages().check_all(tree);
  std::size_t samples = 0;
  std::size_t seen = 0;
  for (bool more = cursor.move(MDB_FIRST); more; more = cursor.move(MDB_NEXT)) {
    if (seen++ == size_) fail_count();
    if (!options.is_sample || options.is_sample(cursor.key()))
      places_.get()[samples++] = {cursor.value().data(), cursor.value().size()};
  }
  if (seen != size_) fail_count();
  size_ = samples;
}

LOCKSTEP_INLINE const std::string& LmdbRecords::file() const { return file_->file(); }

LOCKSTEP_INLINE LmdbRecords::Reader::Reader(const LmdbRecords& records)
    : records_(records), reading_(records.file_->reading()) {}

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
  records_.file_->pages().check_path(records_.file_->tree(), number.text());
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

LOCKSTEP_INLINE void LmdbRecords::require_intact() const {
  const Reader reader(*this);
  const LmdbHeader& header = file_->header();
  struct stat now{};
  // Reading what was cut off would end the process. It does so still where the file is cut between
  // this look and the read: nothing can be done about that.
  if (::fstat(reader.reading_.descriptor, &now) != 0 ||
      static_cast<std::size_t>(now.st_size) < header.used_bytes)
    fail_lmdb_changed(file(), "was cut off");
  if (now.st_mtim.tv_sec != header.changed_s || now.st_mtim.tv_nsec != header.changed_ns)
    fail_lmdb_changed(file(), "was written to");
  reader.require_unchanged();
}

LOCKSTEP_INLINE void LmdbRecords::Reader::require_unchanged() const {
  MDB_envinfo info{};
  mdb_env_info(reading_.environment, &info);
  if (info.me_last_txnid != records_.file_->header().transaction)
    fail_lmdb_changed(records_.file(), "was written to");
}

LOCKSTEP_INLINE void LmdbRecords::fetch(std::span<const std::size_t> indices) const {
  const LmdbRecord* const places = places_.get();
  if (places == nullptr) return;
  for (const std::size_t index : indices) {
    if (index < size_) __builtin_prefetch(&places[index]);
  }
  for (const std::size_t index : indices) {
    if (index >= size_) continue;
    const std::atomic_ref data(places_.get()[index].data);
    __builtin_prefetch(data.load(std::memory_order_relaxed));
  }
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
