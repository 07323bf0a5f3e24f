// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a call throws.

#include <exception>
#include <string>

/// The words of what `f()` throws.
template <class F>
std::string message_of(const F& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}
