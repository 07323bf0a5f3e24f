// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Writes records into a new LMDB, which is there as a whole or not at all.

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/macros.hpp"

namespace lockstep {

/// How `write_lmdb` writes.
struct LmdbWriteOptions {
  bool as_folder = false;  ///< a folder with data.mdb, as most programs write; else one file
  std::size_t commit_bytes = 16_MiB;  ///< records are held in memory up to so many bytes
};

namespace detail {

/// Records are numbered from 0 as they come. They go into a temporary beside `path`, which `finish`
/// brings into place; without that, nothing stays. A temporary that a killed process has left is
/// removed by the next that writes to the same path.
class LmdbWriter {
 public:
  LmdbWriter(const std::string& path, const LmdbWriteOptions& options);
  LmdbWriter(const LmdbWriter&) = delete;
  LmdbWriter& operator=(const LmdbWriter&) = delete;
  ~LmdbWriter();

  void add(std::span<const std::byte> record);
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace detail

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/lmdb_writer.ipp"
#endif
