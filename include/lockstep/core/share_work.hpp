// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Work that a few threads share while the caller waits.

#include <cstddef>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/utility.hpp"

namespace lockstep::detail {

/// Calls `f(task)` for every task below `tasks`, on this thread and as many others as there are
/// cores, four in all at most. Tasks are taken in order. The first exception ends the work, and is
/// thrown here. **Host** blocks until all threads are done.
void share_work(std::size_t tasks, FunctionRef<void(std::size_t)> f);

}  // namespace lockstep::detail
