// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `folder_names.hpp`.

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <charconv>
#include <cstddef>
#include <memory>
#include <utility>

#include "lockstep/checkpoint/folder_names.hpp"
#include "lockstep/checkpoint/write_file.hpp"
#include "lockstep/core/error.hpp"

namespace lockstep::detail {

inline constexpr std::string_view checkpoint_prefix = "step-";
inline constexpr std::string_view checkpoint_suffix = ".safetensors";

LOCKSTEP_INLINE std::string checkpoint_name(std::uint64_t step) {
  std::string digits = text({step});
  if (digits.size() < 12) digits.insert(0, 12 - digits.size(), '0');
  return text({checkpoint_prefix, digits, checkpoint_suffix});
}

/// Removes `end` from the end of `name`; false where it is not there.
LOCKSTEP_INLINE bool cut_end(std::string_view& name, std::string_view end) {
  if (!name.ends_with(end)) return false;
  name.remove_suffix(end.size());
  return true;
}

/// Removes the digits from the end of `name`; false where there are none.
LOCKSTEP_INLINE bool cut_digits(std::string_view& name) {
  const std::size_t last = name.find_last_not_of("0123456789");
  const std::size_t first = last == std::string_view::npos ? 0 : last + 1;
  const bool has_digits = first != name.size();
  name = name.substr(0, first);
  return has_digits;
}

LOCKSTEP_INLINE std::optional<std::uint64_t> checkpoint_step(std::string_view name) {
  std::string_view digits = name;
  if (!digits.starts_with(checkpoint_prefix) || !cut_end(digits, checkpoint_suffix)) return {};
  digits.remove_prefix(checkpoint_prefix.size());
  std::uint64_t step = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (error != std::errc{} || end != digits.data() + digits.size()) return {};
  // One spelling for each step: another would be found and never be replaced.
  return checkpoint_name(step) == name ? std::optional(step) : std::nullopt;
}

LOCKSTEP_INLINE std::string_view shard_stem(std::string_view name) {
  if (!cut_end(name, checkpoint_suffix) || !cut_digits(name) || !cut_end(name, "-of-") ||
      !cut_digits(name) || !cut_end(name, ".rank-")) {
    return {};
  }
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos || dot + 1 == name.size()) return {};
  return name.substr(0, dot);
}

LOCKSTEP_INLINE bool is_temporary_name(std::string_view name) {
  const std::size_t mark = name.rfind(temporary_infix);
  if (mark == std::string_view::npos) return false;
  const std::string_view file = name.substr(0, mark);
  return file.ends_with(checkpoint_suffix) || file == "best.score";
}

LOCKSTEP_INLINE std::vector<std::string> files_in(const std::string& folder) {
  std::vector<std::string> names;
  struct Close {
    void operator()(DIR* entries) const { ::closedir(entries); }
  };
  const std::unique_ptr<DIR, Close> entries(::opendir(folder.c_str()));
  if (!entries) return names;
  while (const dirent* const entry = ::readdir(entries.get())) {
    struct stat status{};
    const int flags = AT_SYMLINK_NOFOLLOW;
    if (::fstatat(::dirfd(entries.get()), entry->d_name, &status, flags) != 0) continue;
    if (S_ISREG(status.st_mode)) names.emplace_back(entry->d_name);
  }
  return names;
}

LOCKSTEP_INLINE std::vector<FoundCheckpoint> list_checkpoints(const std::string& folder) {
  std::vector<FoundCheckpoint> found;
  for (const std::string& name : files_in(folder)) {
    const std::optional<std::uint64_t> step = checkpoint_step(name);
    if (!step) continue;
    // Few, and a sort of the standard library takes long to compile.
    auto place = found.begin();
    while (place != found.end() && place->step > step) ++place;
    found.insert(place, {text({folder, "/", name}), step});
  }
  return found;
}

LOCKSTEP_INLINE std::optional<FoundCheckpoint> newest_valid_checkpoint(
    const std::string& folder, FunctionRef<void(const std::string&)> verify,
    FunctionRef<void(const FoundCheckpoint&, const std::string&)> skipped) {
  std::vector<FoundCheckpoint> candidates = list_checkpoints(folder);
  for (const std::string& name : files_in(folder)) {
    if (name == best_checkpoint_name) candidates.push_back({text({folder, "/", name}), {}});
  }
  for (FoundCheckpoint& candidate : candidates) {
    try {
      verify(candidate.path);
      return std::move(candidate);
    } catch (const Error& error) {
      skipped(candidate, error.problem());
    }
  }
  return std::nullopt;
}

}  // namespace lockstep::detail
