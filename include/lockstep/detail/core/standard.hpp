// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The standard library's common headers and the macros, for every header of the library.

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

#include "lockstep/detail/core/macros.hpp"

// Durations, clocks and `std::function` alone: all of <chrono> and <functional> costs parse time.
#if defined(__GLIBCXX__) && __has_include(<bits/chrono.h>) && __has_include(<bits/std_function.h>)
#include <bits/chrono.h>
#include <bits/std_function.h>
#else
#include <chrono>
#include <functional>
#endif
// IWYU pragma: end_exports
