// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks meet: rank 0 opens the store unless the launcher has, all connect, agree on their
/// numbers, and leave together.

#include <chrono>
#include <string>
#include <string_view>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/session.hpp"

namespace lockstep {

namespace detail {

/// A world of one: a rank with a store that no other process uses.
Session join_alone(std::chrono::milliseconds timeout = default_timeout);

}  // namespace detail

/// Joins as PyTorch's init_process_group does: `env://` (MASTER_ADDR, MASTER_PORT),
/// `tcp://host:port`, where rank 0 is or will be, or `file:///path`, which all ranks can reach.
/// Ranks: all must call. Host: blocks until all have come. Stream: none.
Session join(std::string_view init_method, Rank rank, WorldSize world,
             std::chrono::milliseconds timeout = default_timeout);

/// Joins as the rank that the environment says this process is; alone where it says nothing.
Session join(std::chrono::milliseconds timeout = default_timeout);

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/launch/rendezvous.ipp"
#endif
