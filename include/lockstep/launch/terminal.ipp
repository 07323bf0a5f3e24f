// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `terminal.hpp`.

#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>

#include "lockstep/launch/terminal.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE Terminal detect_terminal(std::FILE* file) {
  Terminal found;
  found.file = file;
  const std::string_view term = std::getenv("TERM") != nullptr ? std::getenv("TERM") : "dumb";
  if (term.empty() || term == "dumb") return found;

  const int fd = ::fileno(file);
  struct stat status{};
  const char* told = fd == STDOUT_FILENO ? std::getenv(columns_variable) : nullptr;
  // A rank whose stdout was redirected to a file still has the variable.
  if (told != nullptr && ::fstat(fd, &status) == 0 && S_ISFIFO(status.st_mode)) {
    if (*told >= '0' && *told <= '9') found.columns = std::strtoul(told, nullptr, 10);
    found.is_terminal = true;
  } else if (::isatty(fd) == 1) {
    winsize size{};
    if (::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) found.columns = size.ws_col;
    found.is_terminal = true;
  }
  const char* no_color = std::getenv("NO_COLOR");
  found.color = found.is_terminal && (no_color == nullptr || *no_color == '\0');
  return found;
}

}  // namespace lockstep::detail
