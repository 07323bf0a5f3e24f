// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What is to be staged: the files of a source and how each becomes one of the copy.

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/utility.hpp"

namespace lockstep::detail {

/// Takes the next bytes of a file of the copy, when so many bytes of its source have been read.
using StageSink = FunctionRef<void(std::span<const std::byte> bytes, std::uint64_t read)>;

/// What is done to the files of a source: `stage_locally` copies them.
struct StageRule {
  std::string_view operation;  ///< for errors
  std::string_view copy;       ///< what a copy is called
  std::string_view ending;     ///< names that end so lose it, and their files are read by `unpack`
  void (*unpack)(int file, const std::string& path, StageSink sink);

  bool unpacks(std::string_view name) const {
    return !ending.empty() && name.ends_with(ending) && name != ending &&
           name[name.size() - ending.size() - 1] != '/';  // something is left of the name
  }
  std::string_view local_name(std::string_view name) const {
    return name.substr(0, name.size() - (unpacks(name) ? ending.size() : 0));
  }
};

/// A file of a source, by its path inside; the name of a source that is a file itself is empty.
struct StageFile {
  std::string name;
  std::uint64_t bytes;
  std::int64_t time;
};

/// When a file was last written, in nanoseconds.
std::int64_t time_of(const struct stat& status);

/// The names in a folder, in the order of the alphabet.
std::vector<std::string> names_in(std::string_view operation, const std::string& folder);

/// Reads a file to its end.
void read_plainly(std::string_view operation, int file, const std::string& path, StageSink sink);

/// A source as it is at one moment.
struct StageSource {
  StageSource(const StageRule& rule, const std::string& path);

  /// The path of a file of the source, and of its copy where that is at `local`.
  std::string path_of(const StageFile& file) const;
  std::string local_path_of(const StageFile& file, const std::string& local) const;
  /// Is this file unpacked?
  bool unpacks(const StageFile& file) const;

  std::uint64_t bytes() const;

  /// Sizes, times and names as a text: two sources are alike if these are.
  std::string facts() const;

  StageRule rule;
  std::string path;
  bool is_folder = false;
  std::vector<std::string> folders{};  ///< inside of it; outer ones first
  std::vector<StageFile> files{};

 private:
  void add_folder(const std::string& name);
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/stage_source.ipp"
#endif
