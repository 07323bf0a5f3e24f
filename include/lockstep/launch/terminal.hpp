// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Whether what is printed ends at a terminal, and how wide that is.

#include <cstddef>
#include <cstdio>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// Where text goes. On a terminal, a line that ends in '\r' instead of '\n' is a status line: the
/// next one takes its place. A launcher passes status lines on, so a pipe to one counts as the
/// terminal at its other end.
struct Terminal {
  std::FILE* file = nullptr;  // null: nowhere
  bool is_terminal = false;
  std::size_t columns = 80;
  bool color = false;
};

/// What `file` is, by its descriptor and the environment: TERM=dumb can redraw nothing, NO_COLOR
/// (no-color.org) asks for plain text.
Terminal detect_terminal(std::FILE* file);

/// How lockstep's launcher tells the ranks' stdout how wide the terminal is that it ends at.
inline constexpr const char* columns_variable = "LOCKSTEP_COLUMNS";

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/launch/terminal.ipp"
#endif
