// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a rank expects of itself: an exception, which the test's runner reports with the
/// rank.

#include <stdexcept>
#include <string>
#include <string_view>

/// Throws `what` unless `ok`.
inline void require(bool ok, std::string_view what) {
  if (!ok) throw std::runtime_error(std::string(what));
}
