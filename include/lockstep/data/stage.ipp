// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `stage.hpp`.

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <optional>
#include <string_view>
#include <utility>

#include "lockstep/core/checksum.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/data/stage.hpp"
#include "lockstep/data/stage_copy.hpp"
#include "lockstep/data/stage_lock.hpp"
#include "lockstep/data/stage_record.hpp"
#include "lockstep/data/stage_source.hpp"

namespace lockstep::detail {

/// A path that is the same from everywhere; links on its way are followed.
LOCKSTEP_INLINE std::string real_path(std::string_view operation, const std::string& path) {
  char* const found = ::realpath(path.c_str(), nullptr);
  if (found == nullptr) fail_reading(operation, path, errno);
  std::string real = found;
  ::free(found);
  return real;
}

/// Is it the same file or folder?
LOCKSTEP_INLINE bool is_same(const std::string& a, const std::string& b) {
  struct stat first{};
  struct stat second{};
  return ::stat(a.c_str(), &first) == 0 && ::stat(b.c_str(), &second) == 0 &&
         first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

/// What is at a copy's place.
struct FoundCopy {
  std::string record;
  bool is_valid = false;
  std::string damage{};  ///< how it differs from what was staged, although the source is the same
};

/// How a file differs from what was staged; empty where it does not.
LOCKSTEP_INLINE std::string damage_of(std::string_view operation, const std::string& path,
                                      const StagedFile& staged, bool verify) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status{};
  if (!file || ::fstat(file.get(), &status) != 0)
    return text({"'", path, "' cannot be read: ", error_text(errno)});
  if (const auto bytes = static_cast<std::uint64_t>(status.st_size); bytes != staged.bytes)
    return text({"'", path, "' has ", bytes, " bytes instead of ", staged.bytes});
  if (time_of(status) != staged.time) return text({"'", path, "' was written to"});
  if (!verify) return {};
  Checksum checksum;
  read_plainly(operation, file.get(), path,
               [&](std::span<const std::byte> bytes, std::uint64_t) { checksum.add(bytes); });
  return checksum.value() == staged.checksum
             ? std::string()
             : text({"the checksum of '", path, "' is not that of what was staged"});
}

LOCKSTEP_INLINE FoundCopy find_copy(const StageSource& source, const StagePlace& place,
                                    const std::string& identity, bool verify) {
  // In this order: a copy's record is there before the copy is.
  struct stat status{};
  const bool is_there = ::lstat(place.local.c_str(), &status) == 0;
  FoundCopy found{read_file(place.record.c_str())};
  if (is_there && found.record.empty()) {
    fail(source.rule.operation, {"'", place.local, "' is there, and was not staged"},
         "remove it if it is not needed, or name another folder");
  }
  if (const auto other = identity_in(found.record); other && is_there && *other != identity) {
    fail(source.rule.operation, {"'", place.local, "' is ", *other, ", and not ", identity},
         "remove it if it is not needed, or name another folder");
  }
  const auto files = staged_files_in(found.record, identity, source.facts());
  if (!is_there || !files || files->size() != source.files.size()) return found;
  for (std::size_t i = 0; i < files->size() && found.damage.empty(); ++i) {
    found.damage =
        damage_of(source.rule.operation, source.local_path_of(source.files[i], place.local),
                  (*files)[i], verify);
  }
  found.is_valid = found.damage.empty();
  return found;
}

LOCKSTEP_INLINE std::string stage(const StageRule& rule, const std::string& path,
                                  std::string folder, const StageOptions& options) {
  const std::string_view operation = rule.operation;
  while (folder.size() > 1 && folder.ends_with('/')) folder.pop_back();
  if (folder.empty()) folder = ".";
  std::string from = path;
  while (from.size() > 1 && from.ends_with('/')) from.pop_back();
  std::string name(name_in_folder(from));
  if (name.empty() || name == "." || name == "..") {
    from = real_path(operation, from);
    name = name_in_folder(from);
  }
  if (name.empty()) fail(operation, {"'", path, "' has no name"}, "name a file or a folder");

  std::optional<StageSource> source(std::in_place, rule, from);
  make_folder(operation, folder);
  const StagePlace place(folder, source->is_folder ? name : rule.local_name(name));
  if (is_same(from, place.local)) return place.local;  // what is in its place needs no copy
  if (source->is_folder && text({real_path(operation, folder), "/"})
                               .starts_with(text({real_path(operation, from), "/"}))) {
    fail(operation, {"'", folder, "' is inside of '", path, "'"}, "name a folder outside of it");
  }
  std::string identity =
      text({rule.copy, " of '", real_path(operation, folder_of(from)), "/", name, "'"});
  std::replace(identity.begin(), identity.end(), '\n', ' ');  // it is a line of the record

  for (;;) {
    // Most often the copy is there, and nobody waits for anybody.
    const FoundCopy found = find_copy(*source, place, identity, options.verify);
    if (found.is_valid) return place.local;
    StageLock lock(operation, place.lock, place.local, {.patience = options.patience});
    source.emplace(rule, from);
    // No two records are alike: if this one is new, another process has made a copy meanwhile.
    if (read_file(place.record.c_str()) != found.record) continue;
    place.remove_leftovers(operation);
    if (!found.damage.empty()) {
      std::fputs(
          text({"lockstep: ", operation, ": ", found.damage, "; it is staged again\n"}).c_str(),
          stderr);
    }
    StageCopy copy(*source, place, lock);
    copy.reserve();
    copy.write();
    copy.commit(identity);
    return place.local;
  }
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE std::string stage_locally(const std::string& path, const std::string& folder,
                                          const StageOptions& options) {
  constexpr detail::StageRule rule{"stage_locally", "a copy", "", nullptr};
  return detail::stage(rule, path, folder, options);
}

}  // namespace lockstep
