// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Terminal detection, and the style of progress output.

#include <cstdio>

#include "lockstep/detail/core/standard.hpp"

namespace lockstep {

/// How a job shows its progress: `--progress auto|bar|lines|none`.
enum class ProgressStyle : std::uint8_t {
  automatic,  ///< a bar where stdout is a terminal, else lines
  bar,        ///< a bar, whatever stdout is
  lines,      ///< a line for each epoch, and one every ten seconds before it
  none,       ///< nothing but what the program prints
};

namespace detail {

/// A destination of text. On a terminal, a line that ends in '\r' instead of '\n' is a status line,
/// which the next one replaces. A launcher forwards these, so its pipe counts as its terminal.
struct Terminal {
  std::FILE* file = nullptr;  // null: no output
  bool is_terminal = false;
  std::size_t columns = 80;
  bool color = false;
  bool is_own = false;    // without a launcher in between
  bool is_quiet = false;  // no progress output
};

/// The style of `--progress`, set before this process has ranks.
inline std::optional<ProgressStyle> chosen_progress_style;
/// The same, or that of LOCKSTEP_PROGRESS.
ProgressStyle progress_style();

/// In the order of `ProgressStyle`.
inline constexpr std::string_view progress_names[] = {"auto", "bar", "lines", "none"};
/// `name` is the variable or option that has this text.
ProgressStyle parse_progress(std::string_view name, std::string_view text);

/// Respects TERM=dumb and NO_COLOR. Under mpirun, which always gives ranks one, no terminal counts.
Terminal detect_terminal(std::FILE* file, ProgressStyle style = progress_style());

/// The current width of a terminal; empty for other descriptors.
std::optional<std::size_t> terminal_columns(int descriptor);

/// Variables by which the launcher passes the width of its terminal, and the style, to ranks.
inline constexpr const char* columns_variable = "LOCKSTEP_COLUMNS";
inline constexpr const char* progress_variable = "LOCKSTEP_PROGRESS";

}  // namespace detail

}  // namespace lockstep
