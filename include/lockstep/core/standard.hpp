// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The vocabulary of the standard library that files of this one are written in, and the
/// macros. Every header includes this one, or another that leads to it, so that a file's includes
/// name what is particular to the file.

// IWYU pragma: begin_exports
#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/macros.hpp"

// Durations, clocks and `std::function`. With libstdc++ they come without the rest of <chrono>,
// calendars that bring streams and locales, and of <functional>, searchers that bring hash tables:
// every program would parse these.
#if defined(__GLIBCXX__) && __has_include(<bits/chrono.h>) && __has_include(<bits/std_function.h>)
#include <bits/chrono.h>
#include <bits/std_function.h>
#else
#include <chrono>
#include <functional>
#endif
// IWYU pragma: end_exports
