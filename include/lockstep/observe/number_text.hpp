// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Numbers as text for people, the same in every locale.

#include <string>

#include "lockstep/core/macros.hpp"

namespace lockstep {

/// A number with a fixed number of decimals.
std::string fixed_text(double value, int decimals);

/// A loss or a score: `0.4123`, and `3.100e-05` where four decimals would say too little.
std::string value_text(double value);

namespace detail {

/// A rate: `54321`, and `3.2` for small ones.
std::string rate_text(double value);

/// A time by the second: `0:12`, `59:59`, `1:02:03`.
std::string clock_text(double seconds);

/// How long something took: `12.3 s`, above a minute by the second.
std::string duration_text(double seconds);

}  // namespace detail

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/observe/number_text.ipp"
#endif
