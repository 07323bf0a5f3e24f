// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The records of an LMDB, by number, for threads and forked ranks. Programs that read them
/// link liblmdb (`-llmdb`).

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/core/macros.hpp"

namespace lockstep {

/// How an LMDB is read.
struct LmdbOptions {
  std::string database{};   ///< a named database in the file; without a name: the main one
  bool read_ahead = false;  ///< lets the system read ahead: for draws in order or in large blocks
  /// Which records are samples, by key: some sets have others, as for their length. Without it, all
  /// are.
  std::function<bool(std::string_view key)> is_sample{};
};

namespace detail {

class LmdbFile;
struct LmdbReading;

/// Bytes of the file, where they are mapped.
struct LmdbRecord {
  const std::byte* data = nullptr;
  std::size_t size = 0;
};

/// The records of a file, which all data sets of this process that read it share. Keys of 8 bytes
/// that are the big-endian numbers from 0, as `write_lmdb` writes them, are looked up once; records
/// under other keys are numbered in the order of their keys, and listed when the file is opened.
///
/// No lock is taken and no file is written beside it, so that a set may lie on a read-only disk. A
/// set that is changed while it is open is an error at the next `require_intact`, by its size, its
/// time and the number of its last transaction.
class LmdbRecords {
 public:
  explicit LmdbRecords(const std::string& path, const LmdbOptions& options = {});

  std::size_t size() const { return size_; }
  /// The file, as errors call it.
  const std::string& file() const;

  /// Throws where the file was cut off or written to since it was opened. Data sets call it before
  /// every batch: reading what was cut off would end the process by a signal.
  void require_intact() const;

  /// Fetches the fronts of records that were looked up before into the cache, all at once: records
  /// that are read one by one would be waited for one by one.
  void fetch(std::span<const std::size_t> indices) const;

  /// What one thread reads records with, for as long as it lives.
  class Reader {
   public:
    explicit Reader(const LmdbRecords& records);
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;
    ~Reader();

    /// The record, where it is mapped; it stays there while the data set lives.
    std::span<const std::byte> operator[](std::size_t index);

    /// Throws if a transaction was committed since the set was opened: what was read may be mixed
    /// up. This reads a mapped page and asks nothing of the system.
    void require_unchanged() const;

   private:
    friend LmdbRecords;

    LmdbRecord look_up(std::size_t index);

    const LmdbRecords& records_;
    LmdbReading& reading_;
    void* transaction_ = nullptr;  ///< none until a record is looked up
  };

  [[noreturn, gnu::cold]] void fail_index(std::size_t index) const;

  /// For handlers: throws what is being handled as the failure to decode a record.
  [[noreturn, gnu::cold]] void rethrow_decoding(std::size_t index, std::size_t bytes) const;

 private:
  std::shared_ptr<LmdbFile> file_;
  /// Where records are: all that are listed, and those that were looked up before. None where that
  /// would be large beside the file.
  std::shared_ptr<LmdbRecord[]> places_;
  std::size_t size_ = 0;
};

}  // namespace detail

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/lmdb.ipp"
#endif
