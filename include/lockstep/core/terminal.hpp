// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Whether output goes to a terminal, how wide that is, and how progress is to be shown.

#include <cstdio>

#include "lockstep/core/standard.hpp"

namespace lockstep {

/// How a job shows its progress: `--progress auto|bar|lines|none`.
enum class ProgressStyle : std::uint8_t {
  automatic,  ///< a bar where stdout is a terminal, else lines
  bar,        ///< a bar, whatever stdout is
  lines,      ///< a line for each epoch, and one every ten seconds before it
  none,       ///< nothing but what the program prints
};

namespace detail {

/// The destination of text. On a terminal, a line that ends in '\r' instead of '\n' is a status
/// line: the next one takes its place. A launcher passes status lines on, so a pipe to one counts
/// as the terminal at its other end.
struct Terminal {
  std::FILE* file = nullptr;  // null: nowhere
  bool is_terminal = false;
  std::size_t columns = 80;
  bool color = false;
  bool is_own = false;    // this process writes to it without a launcher in between
  bool is_quiet = false;  // no progress is to be shown
};

/// The style that `--progress` has told this process, else LOCKSTEP_PROGRESS. The former is set
/// once, before a process has ranks.
ProgressStyle progress_style();
void set_progress_style(std::optional<ProgressStyle> style);

/// `name` is the variable or option that has this text.
ProgressStyle parse_progress(std::string_view name, std::string_view text);
std::string_view progress_text(ProgressStyle style);

/// Finds out what `file` is by its descriptor and the environment: TERM=dumb cannot redraw,
/// NO_COLOR (no-color.org) asks for plain text. mpirun gives ranks a terminal of its own making,
/// whatever its own output is, so that does not count as one.
Terminal detect_terminal(std::FILE* file, ProgressStyle style = progress_style());

/// The width that the terminal behind a descriptor has now, or nothing.
std::optional<std::size_t> terminal_columns(int descriptor);

/// The variables by which lockstep's launcher tells ranks the width of its terminal, and the style.
inline constexpr const char* columns_variable = "LOCKSTEP_COLUMNS";
inline constexpr const char* progress_variable = "LOCKSTEP_PROGRESS";

}  // namespace detail

}  // namespace lockstep
