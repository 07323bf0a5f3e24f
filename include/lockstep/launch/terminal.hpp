// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Whether what is printed ends at a terminal, and how wide that is.

#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace lockstep {

/// Where text goes. On a terminal, a line that ends in '\r' instead of '\n' is a status line: the
/// next one takes its place. A launcher passes status lines on, so a pipe to one counts as the
/// terminal at its other end.
struct Terminal {
  std::FILE* file = nullptr;  // null: nowhere
  bool is_terminal = false;
  std::size_t columns = 80;
  bool color = false;
};

/// How lockstep's launcher tells the ranks' stdout how wide the terminal is that it ends at.
inline constexpr const char* columns_variable = "LOCKSTEP_COLUMNS";

/// What `file` is, by its descriptor and the environment: TERM=dumb can redraw nothing, NO_COLOR
/// (no-color.org) asks for plain text.
inline Terminal detect_terminal(std::FILE* file) {
  Terminal found{.file = file};
  const std::string_view term = std::getenv("TERM") != nullptr ? std::getenv("TERM") : "dumb";
  if (term.empty() || term == "dumb") return found;

  const int fd = ::fileno(file);
  struct stat status{};
  const char* told = fd == STDOUT_FILENO ? std::getenv(columns_variable) : nullptr;
  // A rank whose stdout was redirected to a file still has the variable.
  if (told != nullptr && ::fstat(fd, &status) == 0 && S_ISFIFO(status.st_mode)) {
    const std::string_view digits = told;
    std::from_chars(digits.data(), digits.data() + digits.size(), found.columns);
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

}  // namespace lockstep
