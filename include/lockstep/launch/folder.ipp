// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `folder.hpp`.

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <ctime>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/descriptor.hpp"
#include "lockstep/launch/folder.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE bool make_folder(std::string_view operation, const std::string& folder) {
  bool is_made = false;
  for (std::size_t end = 0; end != folder.size();) {
    end = std::min(folder.find('/', end + 1), folder.size());
    const std::string part = folder.substr(0, end);
    is_made = ::mkdir(part.c_str(), 0777) == 0;
    const int error = errno;
    struct stat status{};
    if (is_made || error == EEXIST || error == EROFS || error == EACCES || error == EPERM) {
      // Folders above it may be closed to us; what counts is that they are there.
      if (is_made || (::stat(part.c_str(), &status) == 0 && S_ISDIR(status.st_mode))) continue;
    }
    fail(operation,
         {"the folder '", folder, "' cannot be made: ",
          error == EEXIST ? text({"'", part, "' is no folder"}) : error_text(error)},
         "name a folder that exists or may be made");
  }
  return is_made;
}

LOCKSTEP_INLINE std::string owner_text() {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  char program[4096];
  const ssize_t size = ::readlink("/proc/self/exe", program, sizeof program);
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char time[32];
  std::strftime(time, sizeof time, "%Y-%m-%d %H:%M:%S UTC", &utc);
  return text({"process ", ::getpid(), " on ", host, ", ",
               std::string_view(program, size > 0 ? static_cast<std::size_t>(size) : 0), ", since ",
               time});
}

}  // namespace lockstep::detail
