// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `open_files.hpp`.

#include <dirent.h>
#include <sys/resource.h>

#include <algorithm>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/open_files.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::size_t open_files() {
  DIR* const folder = ::opendir("/proc/self/fd");
  if (folder == nullptr) return 64;  // without /proc: more than a program has at its start
  std::size_t count = 0;
  while (const dirent* const entry = ::readdir(folder)) count += entry->d_name[0] != '.' ? 1 : 0;
  ::closedir(folder);
  return count - 1;  // without the folder itself
}

LOCKSTEP_INLINE std::size_t prefer_open_files(std::size_t more) {
  const std::size_t now = open_files();
  const auto needed = static_cast<rlim_t>(now + more);
  rlimit limits{};
  if (::getrlimit(RLIMIT_NOFILE, &limits) != 0) return more;
  if (limits.rlim_cur < needed && limits.rlim_cur < limits.rlim_max) {
    const rlimit raised{std::min(needed, limits.rlim_max), limits.rlim_max};
    if (::setrlimit(RLIMIT_NOFILE, &raised) == 0) limits = raised;
  }
  const rlim_t left = limits.rlim_cur > now ? limits.rlim_cur - static_cast<rlim_t>(now) : 0;
  return static_cast<std::size_t>(std::min(left, static_cast<rlim_t>(1) << 30));
}

LOCKSTEP_INLINE std::size_t allow_open_files(std::size_t more, const char* whose,
                                             std::size_t ranks) {
  const std::size_t allowed = prefer_open_files(more);
  if (allowed >= more) return allowed;
  const std::size_t now = open_files();
  fail("launch",
       {whose, " ", ranks, ranks == 1 ? " rank" : " ranks", " needs ", now + more,
        " open files, and this process may have ", now + allowed},
       text({"raise the hard limit to at least ", now + more,
             " where the job starts: ulimit -Hn, LimitNOFILE= of a systemd unit, --ulimit nofile= "
             "of a container"}));
}

}  // namespace lockstep::detail
