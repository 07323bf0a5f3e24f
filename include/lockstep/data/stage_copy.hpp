// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A copy while it is being made: beside its place, and removed unless it is brought there.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/macros.hpp"
#include "lockstep/data/stage_lock.hpp"
#include "lockstep/data/stage_record.hpp"
#include "lockstep/data/stage_source.hpp"

namespace lockstep::detail {

/// Where a copy is, and what lies beside it.
struct StagePlace {
  StagePlace(std::string in, std::string_view name);

  std::string folder;
  std::string local;   ///< the copy
  std::string record;  ///< what it is a copy of
  std::string lock;
  std::string temporary;  ///< the names of temporaries begin so

  /// Removes what a process that was killed has left.
  void remove_leftovers(std::string_view operation) const;
};

/// Removes a file or a folder with all that is in it, if it is there.
void remove_tree(const std::string& path);

class StageCopy {
 public:
  StageCopy(const StageSource& source, const StagePlace& place, StageLock& lock);
  ~StageCopy() { remove_tree(root_); }
  StageCopy(const StageCopy&) = delete;
  StageCopy& operator=(const StageCopy&) = delete;

  /// Makes all files, as large as they will be: a disk that is too small is known before anything
  /// is written.
  void reserve();
  void write();
  /// Brings the copy into its place, behind a record of this identity.
  void commit(const std::string& identity);

 private:
  void reserve(const StageFile& file);
  StagedFile write(const StageFile& file);
  void put(int file, std::span<const std::byte> bytes, std::uint64_t at);
  [[noreturn]] void fail_writing(int error);
  [[noreturn]] void fail_changed(const std::string& path) const;

  const StageSource& source_;
  const StagePlace& place_;
  StageLock& lock_;
  std::string root_;
  std::uint64_t all_;       // bytes of the source
  std::uint64_t read_ = 0;  // of them, from files that are through
  std::uint64_t written_ = 0;
  bool unpacks_ = false;
  std::vector<StagedFile> files_{};
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/stage_copy.ipp"
#endif
