// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Durations, clocks and `std::function`. With libstdc++ they come without the rest of
/// <chrono>, calendars that bring streams and locales, and of <functional>, searchers that bring
/// hash tables: every program would parse these.

#include <cstddef>  // says whose library this is

#if defined(__GLIBCXX__) && __has_include(<bits/chrono.h>) && __has_include(<bits/std_function.h>)
#include <bits/chrono.h>
#include <bits/std_function.h>
#else
#include <chrono>
#include <functional>
#endif
