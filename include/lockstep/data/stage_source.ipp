// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `stage_source.hpp`.

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/data/stage_source.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::int64_t time_of(const struct stat& status) {
  return std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
}

LOCKSTEP_INLINE std::vector<std::string> names_in(std::string_view operation,
                                                  const std::string& folder) {
  struct Close {
    void operator()(DIR* entries) const { ::closedir(entries); }
  };
  const std::unique_ptr<DIR, Close> entries(::opendir(folder.c_str()));
  if (!entries) fail_reading(operation, folder, errno);
  std::vector<std::string> names;
  while (const dirent* const entry = ::readdir(entries.get())) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

LOCKSTEP_INLINE void read_plainly(std::string_view operation, int file, const std::string& path,
                                  StageSink sink) {
  std::vector<std::byte> buffer(write_chunk_bytes);
  for (std::uint64_t read = 0;;) {
    const ssize_t n = ::read(file, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_reading(operation, path, errno);
    if (n == 0) return;
    read += static_cast<std::uint64_t>(n);
    sink(std::span(buffer).first(static_cast<std::size_t>(n)), read);
  }
}

LOCKSTEP_INLINE StageSource::StageSource(const StageRule& how, const std::string& from)
    : rule(how), path(from) {
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0) fail_reading(rule.operation, path, errno);
  if (S_ISDIR(status.st_mode)) {
    is_folder = true;
    add_folder("");
  } else if (S_ISREG(status.st_mode)) {
    files.push_back({"", static_cast<std::uint64_t>(status.st_size), time_of(status)});
  } else {
    fail(rule.operation, {"'", path, "' is neither a file nor a folder"}, "name one of the two");
  }
}

LOCKSTEP_INLINE void StageSource::add_folder(const std::string& name) {
  const std::string folder = name.empty() ? path : text({path, "/", name});
  const std::vector<std::string> names = names_in(rule.operation, folder);
  const auto has = [&](std::string_view wanted) {
    return std::binary_search(names.begin(), names.end(), wanted);
  };
  for (const std::string& each : names) {
    // Says who reads an LMDB on the source's host. It is no data, and may change at any time.
    if (each == "lock.mdb" && has("data.mdb")) continue;
    const std::string inner = name.empty() ? each : text({name, "/", each});
    const std::string whole = text({path, "/", inner});
    struct stat status{};
    struct stat link{};
    if (::stat(whole.c_str(), &status) != 0 || ::lstat(whole.c_str(), &link) != 0)
      fail_reading(rule.operation, whole, errno);
    if (S_ISDIR(status.st_mode) && !S_ISLNK(link.st_mode)) {
      folders.push_back(inner);
      add_folder(inner);
    } else if (S_ISREG(status.st_mode)) {
      if (rule.unpacks(each) && has(rule.local_name(each))) {
        fail(rule.operation,
             {"'", folder, "' has both '", rule.local_name(each), "' and '", each,
              "', whose copies would be one file"},
             "remove one of the two");
      }
      files.push_back({inner, static_cast<std::uint64_t>(status.st_size), time_of(status)});
    } else if (S_ISDIR(status.st_mode)) {
      // It may lead to a folder that it is in.
      fail(rule.operation, {"'", whole, "' is a link to a folder"},
           "put the folder itself there, or stage what it leads to by itself");
    } else {
      fail(rule.operation, {"'", whole, "' is neither a file nor a folder"}, "remove it");
    }
  }
}

LOCKSTEP_INLINE bool StageSource::unpacks(const StageFile& file) const {
  return rule.unpacks(is_folder ? std::string_view(file.name) : name_in_folder(path));
}

LOCKSTEP_INLINE std::string StageSource::path_of(const StageFile& file) const {
  return is_folder ? text({path, "/", file.name}) : path;
}

LOCKSTEP_INLINE std::string StageSource::local_path_of(const StageFile& file,
                                                       const std::string& local) const {
  return is_folder ? text({local, "/", rule.local_name(file.name)}) : local;
}

LOCKSTEP_INLINE std::uint64_t StageSource::bytes() const {
  std::uint64_t bytes = 0;
  for (const StageFile& file : files) bytes += file.bytes;
  return bytes;
}

LOCKSTEP_INLINE std::string StageSource::facts() const {
  std::string facts = is_folder ? "folder\n" : "file\n";
  for (const std::string& folder : folders)
    facts += text({"folder ", folder.size(), " ", folder, "\n"});
  for (const StageFile& file : files)
    facts += text({file.bytes, " ", file.time, " ", file.name.size(), " ", file.name, "\n"});
  return facts;
}

}  // namespace lockstep::detail
