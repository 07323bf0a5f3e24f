// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `terminal.hpp`.

#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/terminal.hpp"

namespace lockstep::detail {

inline constexpr std::string_view progress_words[] = {"auto", "bar", "lines", "none"};

LOCKSTEP_INLINE std::string_view progress_text(ProgressStyle style) {
  return progress_words[static_cast<std::size_t>(style)];
}

LOCKSTEP_INLINE ProgressStyle parse_progress(std::string_view name, std::string_view text) {
  for (std::size_t i = 0; i < std::size(progress_words); ++i) {
    if (text == progress_words[i]) return static_cast<ProgressStyle>(i);
  }
  fail("launch", {name, " is '", text, "'"}, "give it auto, bar, lines or none");
}

LOCKSTEP_INLINE std::optional<ProgressStyle>& told_progress_style() {
  static std::optional<ProgressStyle> style;
  return style;
}
LOCKSTEP_INLINE void set_progress_style(std::optional<ProgressStyle> style) {
  told_progress_style() = style;
}

LOCKSTEP_INLINE ProgressStyle progress_style() {
  if (const auto told = told_progress_style()) return *told;
  const char* text = std::getenv(progress_variable);
  return text != nullptr ? parse_progress(progress_variable, text) : ProgressStyle::automatic;
}

LOCKSTEP_INLINE std::optional<std::size_t> terminal_columns(int descriptor) {
  winsize size{};
  if (::ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return std::nullopt;
  return size.ws_col;
}

LOCKSTEP_INLINE Terminal detect_terminal(std::FILE* file, ProgressStyle style) {
  Terminal found;
  found.file = file;
  found.is_quiet = style == ProgressStyle::none;
  if (style == ProgressStyle::lines || found.is_quiet) return found;
  const bool is_forced = style == ProgressStyle::bar;
  const std::string_view term = std::getenv("TERM") != nullptr ? std::getenv("TERM") : "dumb";
  if ((term.empty() || term == "dumb") && !is_forced) return found;

  const int fd = ::fileno(file);
  struct stat status{};
  const char* told = fd == STDOUT_FILENO ? std::getenv(columns_variable) : nullptr;
  // A rank whose stdout was redirected to a file still has the variable.
  if (told != nullptr && ::fstat(fd, &status) == 0 && S_ISFIFO(status.st_mode)) {
    if (*told >= '0' && *told <= '9') found.columns = std::strtoul(told, nullptr, 10);
    found.is_terminal = true;
  } else if (::isatty(fd) == 1 && (is_forced || std::getenv("OMPI_COMM_WORLD_RANK") == nullptr)) {
    found.columns = terminal_columns(fd).value_or(found.columns);
    found.is_terminal = found.is_own = true;
  }
  found.is_terminal = found.is_terminal || is_forced;
  const char* no_color = std::getenv("NO_COLOR");
  found.color = found.is_terminal && (no_color == nullptr || *no_color == '\0');
  return found;
}

}  // namespace lockstep::detail
