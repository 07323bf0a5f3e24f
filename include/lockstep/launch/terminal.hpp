// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Whether output goes to a terminal, and how wide that is.

#include <cstddef>
#include <cstdio>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// The destination of text. On a terminal, a line that ends in '\r' instead of '\n' is a status
/// line: the next one takes its place. A launcher passes status lines on, so a pipe to one counts
/// as the terminal at its other end.
struct Terminal {
  std::FILE* file = nullptr;  // null: nowhere
  bool is_terminal = false;
  std::size_t columns = 80;
  bool color = false;
};

/// Finds out what `file` is by its descriptor and the environment: TERM=dumb cannot redraw,
/// NO_COLOR (no-color.org) asks for plain text.
Terminal detect_terminal(std::FILE* file);

/// The variable by which lockstep's launcher tells ranks the width of its terminal.
inline constexpr const char* columns_variable = "LOCKSTEP_COLUMNS";

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/launch/terminal.ipp"
#endif
