// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How much of a file is loaded.

#include <cstdint>

namespace lockstep::detail {

enum class LoadWhat : std::uint8_t { parameters, training, job };

}  // namespace lockstep::detail
