// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `restarts.hpp`.

#include "lockstep/launch/environment.hpp"
#include "lockstep/launch/restarts.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::size_t restart_count() { return environment().restarts(); }

}  // namespace lockstep::detail
